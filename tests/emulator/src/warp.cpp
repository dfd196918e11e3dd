// A warp's paths: how its lanes diverge at branches, reconverge, and wait for each other.
#include <sstream>

#include "cluster.h"
#include "wgmma.h"

namespace emulator {
namespace {

std::string hex(uint32_t mask) {
    std::ostringstream text;
    text << "0x" << std::hex << mask;
    return text.str();
}

}  // namespace

Warp::Warp(Cta& cta, int index, uint32_t lanes)
    : cta(cta), num_registers(registers_at_launch(cta.launch)), index_(index), lanes_(lanes), live_(lanes) {
    const FunctionCode& kernel = *cta.launch.program->functions[0];
    Path start;
    start.mask = lanes;
    start.pc = kernel.first;
    start.frame = new_frame(kernel, nullptr, nullptr, nullptr);
    paths_.push_back(start);
}

Warp::~Warp() = default;

WgmmaUnit& Warp::wgmma() {
    if (wgmma_ == nullptr) wgmma_ = std::make_unique<WgmmaUnit>(*this);
    return *wgmma_;
}

Place Warp::position_of(const Operation* operation, int lane) const {
    Place place;
    const Program& program = *cta.launch.program;
    place.kernel = program.name;
    std::copy(cta.index, cta.index + 3, place.cta);
    if (lane >= 0) {
        const int linear = thread(lane), x = cta.launch.block[0], y = cta.launch.block[1];
        place.thread[0] = linear % x, place.thread[1] = linear / x % y, place.thread[2] = linear / x / y;
    }
    if (operation != nullptr && operation->instruction != nullptr) {
        const ptx::Instruction& instruction = *operation->instruction;
        place.line = instruction.line;
        place.text = program.module->line(instruction.line);
        const auto file = program.module->files.find(instruction.source_file);
        if (file != program.module->files.end() && instruction.source_line > 0) {
            place.source = file->second + ":" + std::to_string(instruction.source_line);
        }
    }
    return place;
}

bool Warp::is_runnable() const {
    for (const Path& path : paths_) {
        if (path.state == Path::State::kReady) return true;
    }
    return false;
}

// Makes a random ready path the running one. Returns false if no path is ready.
bool Warp::choose_path() {
    int num_ready = 0;
    for (const Path& path : paths_) num_ready += path.state == Path::State::kReady;
    if (num_ready == 0) return false;
    int chosen = num_ready == 1 ? 0 : static_cast<int>(cta.random.below(num_ready));
    for (size_t i = 0; i < paths_.size(); ++i) {
        if (paths_[i].state != Path::State::kReady || chosen-- > 0) continue;
        path_ = paths_[i];
        paths_.erase(paths_.begin() + static_cast<std::ptrdiff_t>(i));
        base_ = path_.frame->registers.get();
        return true;
    }
    return false;
}

void Warp::run(int64_t budget) {
    const Operation* const operations = cta.launch.program->operations.data();
    Counts* const counts = cta.report.operations.data();
    Cluster& cluster = cta.cluster;
    const int64_t start = cluster.clock;
    const auto check_limit = [&] {
        const int64_t executed = executed_ + cluster.clock - start;
        if (executed > cta.launch.instruction_limit) {
            throw Fault("limit", "a warp has executed " + std::to_string(executed) +
                                     " instructions and has not ended: instruction_limit");
        }
    };
    while (budget > 0 && choose_path()) {
        const Operation* operation = nullptr;
        try {
            if (!arrive_at_joins()) continue;
            while (true) {
                operation = operations + path_.pc;
                uint32_t mask = path_.mask;
                if (operation->is_guarded)
                    mask &= predicate(operation->guard) ^ (operation->guard_negated ? kAllLanes : 0);
                Next next = Next::kContinue;
                if (mask != 0) {
                    if (operation->is_aligned && mask != lanes_of_aligned(*operation)) {
                        throw Fault("divergence",
                                    "an .aligned instruction is reached by lanes " + hex(mask) + " of the warp's " +
                                        hex(lanes_of_aligned(*operation)),
                                    __builtin_ctz(mask));
                    }
                    if (operation->has_member_mask && !gather_members(*operation, mask)) break;
                    ++counts[path_.pc].warps;
                    counts[path_.pc].lanes += __builtin_popcount(mask);
                    if (operation->tracked >= 0) wgmma().touch(*operation, mask);
                    next = operation->execute(*this, *operation, mask);
                }
                if (++cluster.clock >= next_due_) land_due_copies();
                cluster.async.advance(cluster.clock);
                --budget;
                if (next == Next::kBlocked) break;
                if (next == Next::kContinue) ++path_.pc;
                if (path_.join >= 0 && path_.pc == joins_[path_.join].pc && !arrive_at_joins()) break;
                if (budget <= 0) break;
            }
            check_limit();
        } catch (Fault& fault) {
            if (fault.place.line < 0) fault.place = position_of(operation, fault.lane);
            throw;
        }
        if (path_.mask != 0) paths_.push_back(path_);
        path_.mask = 0;
    }
    executed_ += cluster.clock - start;
}

// Returns the lanes that must execute an .aligned instruction together: those that have not exited, or all 32 if each
// lane holds a fragment of a matrix.
uint32_t Warp::lanes_of_aligned(const Operation& operation) const {
    const bool has_matrix = operation.type == Class::kTensorCore || operation.type == Class::kMatrixLoad;
    return has_matrix ? kAllLanes : live_;
}

// Handles the joins at the running path's pc. Returns false if it merges into the path that will arrive there last.
bool Warp::arrive_at_joins() {
    while (path_.join >= 0 && path_.pc == joins_[path_.join].pc) {
        Join& join = joins_[path_.join];
        join.arrived |= path_.mask;
        if (join.arrived != join.expected) {
            path_.mask = 0;
            return false;
        }
        path_.mask = join.arrived;
        path_.in_step = 0;
        const bool ends_call = join.ends_call;
        path_.join = join.parent;
        join.expected = 0;
        if (ends_call) return_from_call(path_.mask);
    }
    return true;
}

int Warp::new_join(int pc, uint32_t expected, int parent, bool ends_call) {
    size_t free = 0;
    while (free < joins_.size() && joins_[free].expected != 0) ++free;
    if (free == joins_.size()) joins_.emplace_back();
    joins_[free] = {pc, expected, 0, parent, ends_call, path_.frame};
    return static_cast<int>(free);
}

Next Warp::branch(const Operation& operation, uint32_t taken) {
    if (taken == path_.mask) {
        path_.pc = operation.target;
        return Next::kJumped;
    }
    if (path_.join < 0 || joins_[path_.join].pc != operation.join) {
        path_.join = new_join(operation.join, path_.mask, path_.join, false);
    }
    Path other = path_;
    other.mask = taken;
    other.pc = operation.target;
    path_.mask &= ~taken;
    ++path_.pc;
    if (cta.random.below(2) == 0) std::swap(path_, other);
    paths_.push_back(other);
    return Next::kJumped;
}

Next Warp::branch_indexed(const Operation& operation, uint32_t mask) {
    const std::vector<int32_t>& table = cta.launch.program->jump_tables[operation.value];
    const uint32_t* index = reg<uint32_t>(operation.r[0]);
    if (path_.join < 0 || joins_[path_.join].pc != operation.join) {
        path_.join = new_join(operation.join, path_.mask, path_.join, false);
    }
    if (mask != path_.mask) {
        Path passing = path_;
        passing.mask &= ~mask;
        ++passing.pc;
        paths_.push_back(passing);
    }
    while (mask != 0) {
        const int lane = __builtin_ctz(mask);
        if (index[lane] >= table.size())
            throw Fault("out-of-bounds", "brx.idx: index beyond the list of targets", lane);
        Path path = path_;
        path.mask = 0;
        path.pc = table[index[lane]];
        for (int other = lane; other < kWarpSize; ++other) {
            if ((mask >> other & 1) != 0 && index[other] == index[lane]) path.mask |= 1u << other;
        }
        mask &= ~path.mask;
        paths_.push_back(path);
    }
    path_.mask = 0;
    return Next::kBlocked;
}

Next Warp::exit(uint32_t mask) {
    live_ &= ~mask;
    path_.mask &= ~mask;
    for (size_t i = 0; i < joins_.size(); ++i) {
        Join& join = joins_[i];
        if (join.expected == 0) continue;
        join.expected &= ~mask;
        join.arrived &= ~mask;
        if (join.expected != 0 && join.arrived == join.expected) complete(static_cast<int>(i));
    }
    for (Path& path : paths_) {  // paths that waited for these lanes retry
        if (path.state == Path::State::kMembers) path.state = Path::State::kReady;
    }
    if (cta.cluster.order) {
        cta.cluster.order->exit({number(), mask});
        if (cta.has_ended()) cta.cluster.order->end(cta.rank);
    }
    cta.lanes_exited();
    cta.cluster.lanes_exited();
    return path_.mask == 0 ? Next::kBlocked : Next::kContinue;
}

// Merges the lanes of a join, all of which have arrived or exited, into one ready path at the join.
void Warp::complete(int index) {
    Path path;
    path.mask = joins_[index].expected;
    path.pc = joins_[index].pc;
    path.join = index;
    joins_[index].arrived = 0;
    path.frame = joins_[index].frame;
    paths_.push_back(path);
}

// Returns true, with all lanes in `mask`, once the live lanes of a .sync instruction's member mask have arrived at it.
bool Warp::gather_members(const Operation& operation, uint32_t& mask) {
    const uint32_t* const masks = reg<uint32_t>(operation.member_mask);
    const uint32_t named = masks[__builtin_ctz(mask)];
    uint32_t alike = 0;
    each_lane(mask, [&](int lane) { alike |= uint32_t{masks[lane] == named} << lane; });
    if (alike != mask) {  // lanes with different masks do not wait for each other: they become separate paths
        path_.join = new_join(path_.pc + 1, path_.mask, path_.join, false);
        Path part = path_;
        part.mask = alike;
        paths_.push_back(part);
        part.mask = mask & ~alike;
        paths_.push_back(part);
        part.mask = path_.mask & ~mask;
        ++part.pc;
        if (part.mask != 0) paths_.push_back(part);
        path_.mask = 0;
        return false;
    }
    if ((mask & ~named) != 0) {
        throw Fault("divergence", "the member mask " + hex(named) + " lacks the lane that executes the instruction",
                    __builtin_ctz(mask & ~named));
    }
    const uint32_t needed = named & live_;
    if ((needed & ~mask) == 0) return true;
    uint32_t here = mask;
    const auto waits_here = [&](const Path& path) {
        return path.state == Path::State::kMembers && path.pc == path_.pc && path.frame == path_.frame &&
               masks[__builtin_ctz(path.waiting_mask)] == named;
    };
    for (const Path& path : paths_) here |= waits_here(path) ? path.waiting_mask : 0;
    if ((needed & ~here) != 0) {
        path_.state = Path::State::kMembers;
        path_.waiting_mask = mask;
        return false;
    }
    for (Path& path : paths_) {
        if (!waits_here(path)) continue;
        path.state = Path::State::kReady;
        ++path.pc;
    }
    mask = here;
    return true;
}

Next Warp::wait_at_barrier(const Operation& operation, uint32_t mask) {
    if (cta.arrive(operation, *this, path_.frame, mask, true)) return Next::kContinue;
    path_.state = Path::State::kBarrier;
    path_.waiting_mask = mask;
    return Next::kBlocked;
}

void Warp::arrive_at_barrier(const Operation& operation, uint32_t mask) {
    cta.arrive(operation, *this, path_.frame, mask, false);
}

Next Warp::wait_and_retry(Path::State state, uint32_t mask) {
    Counts& counts = cta.report.operations[path_.pc];  // only the last execution counts
    --counts.warps;
    counts.lanes -= __builtin_popcount(mask);
    path_.state = state;
    path_.waiting_mask = mask;
    return Next::kBlocked;
}

void Warp::retry(Path::State state) {
    if (path_.mask != 0 && path_.state == state) path_.state = Path::State::kReady;  // the running path just blocked
    for (Path& path : paths_) {
        if (path.state == state) path.state = Path::State::kReady;
    }
}

bool Warp::time_out() {
    bool any = false;
    for (Path& path : paths_) {
        if (path.state != Path::State::kMbarrier) continue;
        path.state = Path::State::kReady;
        path.has_timed_out = any = true;
    }
    return any;
}

bool Warp::release(uint32_t mask) {
    for (Path& path : paths_) {
        if (path.state != Path::State::kBarrier || path.waiting_mask != mask) continue;
        path.state = Path::State::kReady;
        ++path.pc;
        return true;
    }
    return false;
}

}  // namespace emulator
