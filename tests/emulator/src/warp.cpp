// A warp's paths: how its lanes part at branches, meet again, call, return and wait for each other.
#include <algorithm>
#include <sstream>

#include "cluster.h"
#include "wgmma.h"

namespace emulator {
namespace {

constexpr int64_t kMostLocalBytes = 512 << 10;  // of a thread, as the hardware has it

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

Frame* Warp::new_frame(const FunctionCode& code, Frame* caller, const Operation* at, const Call* call) {
    auto frame = std::make_unique<Frame>();
    frame->code = &code;
    frame->registers.reset(new std::byte[code.image.size()]);
    std::memcpy(frame->registers.get(), code.image.data(), code.image.size());
    frame->local_base = caller == nullptr ? 0 : caller->local_end;
    frame->local_end = frame->local_base + code.local_bytes;
    frame->caller = caller;
    frame->at = at;
    frame->call = call;
    if (frame->local_end > kMostLocalBytes) {
        throw Fault("limit", "a thread needs more than " + std::to_string(kMostLocalBytes >> 10) +
                                 " KiB of local memory: recursion without an end?");
    }
    for (auto& bytes : local_) {
        if (static_cast<int64_t>(bytes.size()) < frame->local_end) bytes.resize(frame->local_end, std::byte{0xff});
    }
    const Launch& launch = cta.launch;
    for (const SpecialSlot& special : code.specials) {
        for (int lane = 0; lane < kWarpSize; ++lane) {
            const uint32_t linear = static_cast<uint32_t>(thread(lane));
            const uint32_t tid[3] = {linear % launch.block[0], linear / launch.block[0] % launch.block[1],
                                     linear / launch.block[0] / launch.block[1]};
            uint64_t value = 0;
            const int i = special.index;
            switch (special.special) {
                case Special::kTid:
                    value = tid[i];
                    break;
                case Special::kNtid:
                    value = launch.block[i];
                    break;
                case Special::kCtaid:
                    value = cta.index[i];
                    break;
                case Special::kNctaid:
                    value = launch.grid[i];
                    break;
                case Special::kLaneid:
                    value = lane;
                    break;
                case Special::kWarpid:
                    value = index_;
                    break;
                case Special::kNwarpid:
                    value = (launch.block[0] * launch.block[1] * launch.block[2] + kWarpSize - 1) / kWarpSize;
                    break;
                case Special::kLanemask: {  // eq, le, lt, ge, gt
                    const uint32_t eq = 1u << lane, lt = eq - 1;
                    const uint32_t masks[] = {eq, lt | eq, lt, ~lt, ~(lt | eq)};
                    value = masks[i];
                    break;
                }
                case Special::kDynamicShared:
                    value = launch.shared_bytes;
                    break;
                case Special::kTotalShared:
                    value = cta.shared_bytes();
                    break;
                case Special::kLocalBase:
                    value = frame->local_base + i;
                    break;
                case Special::kEnvironment:  // upper and lower half of an address
                    value = i == 1 ? launch.grid_workspace >> 32 : launch.grid_workspace & 0xffffffff;
                    break;
                case Special::kSmid:  // CTAs are dealt to multiprocessors in turn
                    value = (cta.index[0] + launch.grid[0] * (cta.index[1] + uint64_t{launch.grid[1]} * cta.index[2])) %
                            launch.num_sms;
                    break;
                case Special::kNsmid:
                    value = launch.num_sms;
                    break;
                case Special::kGridid:
                    value = 1;
                    break;
                case Special::kClusterid:
                    value = cta.cluster.index[i];
                    break;
                case Special::kNclusterid:
                    value = launch.grid[i] / launch.cluster[i];
                    break;
                case Special::kClusterCtaid:
                    value = cta.index[i] % launch.cluster[i];
                    break;
                case Special::kClusterNctaid:
                    value = launch.cluster[i];
                    break;
                case Special::kClusterCtarank:
                    value = cta.rank;
                    break;
                case Special::kClusterNctarank:
                    value = launch.cluster[0] * launch.cluster[1] * launch.cluster[2];
                    break;
            }
            std::memcpy(frame->registers.get() + special.slot + lane * special.width, &value, special.width);
        }
    }
    frames_.push_back(std::move(frame));
    return frames_.back().get();
}

Place Warp::place_of(const Operation* operation, int lane) const {
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
        place.text = program.module->lines[instruction.line - 1];
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

// Takes one of the ready paths, by lot, as the one that runs.
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
                    if (operation->is_aligned && mask != live_) {
                        throw Fault(
                            "divergence",
                            "an .aligned instruction is reached by lanes " + hex(mask) + " of the warp's " + hex(live_),
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
            if (fault.place.line < 0) fault.place = place_of(operation, fault.lane);
            throw;
        }
        if (path_.mask != 0) paths_.push_back(path_);
        path_.mask = 0;
    }
    executed_ += cluster.clock - start;
}

// False: the path has come to where it waits for others, and is theirs now.
bool Warp::arrive_at_joins() {
    while (path_.join >= 0 && path_.pc == joins_[path_.join].pc) {
        Join& join = joins_[path_.join];
        join.arrived |= path_.mask;
        if (join.arrived != join.expected) {
            path_.mask = 0;
            return false;
        }
        path_.mask = join.arrived;
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

Next Warp::call(const Operation& operation, const Call* const* calls, uint32_t mask) {
    const Call* const first = calls[__builtin_ctz(mask)];
    uint32_t same = 0;
    each_lane(mask, [&](int lane) { same |= uint32_t{calls[lane] == first} << lane; });
    if (same == path_.mask) {
        enter(path_, operation, *first);
        base_ = path_.frame->registers.get();
        return Next::kJumped;
    }
    // Lanes that do not call, and those that call other functions, are paths of their own up to what follows the call.
    path_.join = new_join(path_.pc + 1, path_.mask, path_.join, false);
    if (mask != path_.mask) {
        Path passing = path_;
        passing.mask &= ~mask;
        ++passing.pc;
        paths_.push_back(passing);
    }
    while (mask != 0) {
        const Call* const call = calls[__builtin_ctz(mask)];
        Path path = path_;
        path.mask = 0;
        each_lane(mask, [&](int lane) { path.mask |= uint32_t{calls[lane] == call} << lane; });
        mask &= ~path.mask;
        enter(path, operation, *call);
        paths_.push_back(path);
    }
    path_.mask = 0;
    return Next::kBlocked;
}

// Puts a path at the beginning of a function, in a frame with its parameters.
void Warp::enter(Path& path, const Operation& operation, const Call& call) {
    Frame* caller = path.frame;
    path.frame = new_frame(*call.callee, caller, &operation, &call);
    path.join = new_join(call.callee->end, path.mask, path.join, true);
    joins_[path.join].frame = path.frame;
    path.pc = call.callee->first;
    for (const Copy& copy : call.arguments) {
        each_lane(path.mask, [&](int lane) {
            std::byte* local = local_[lane].data();
            std::memcpy(local + path.frame->local_base + copy.to, local + caller->local_base + copy.from, copy.bytes);
        });
    }
}

void Warp::return_from_call(uint32_t mask) {
    Frame* ended = path_.frame;
    Frame* caller = ended->caller;
    for (const Copy& copy : ended->call->results) {
        each_lane(mask, [&](int lane) {
            std::byte* local = local_[lane].data();
            std::memcpy(local + caller->local_base + copy.to, local + ended->local_base + copy.from, copy.bytes);
        });
    }
    path_.pc = static_cast<int>(ended->at - cta.launch.program->operations.data()) + 1;
    path_.frame = caller;
    base_ = caller->registers.get();
    if (wgmma_ != nullptr) wgmma_->leave(ended);
    const auto last = std::find_if(frames_.rbegin(), frames_.rend(), [&](const auto& f) { return f.get() == ended; });
    frames_.erase(std::next(last).base());
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
    for (Path& path : paths_) {  // those who waited for the lanes that have left try again
        if (path.state == Path::State::kMembers) path.state = Path::State::kReady;
    }
    if (live_ == 0 && cta.cluster.order) cta.cluster.order->exit(number());
    cta.lanes_exited();
    cta.cluster.lanes_exited();
    return path_.mask == 0 ? Next::kBlocked : Next::kContinue;
}

// All lanes that still can come have arrived: they go on as one path, which stands before the join.
void Warp::complete(int index) {
    Path path;
    path.mask = joins_[index].expected;
    path.pc = joins_[index].pc;
    path.join = index;
    joins_[index].arrived = 0;
    path.frame = joins_[index].frame;
    paths_.push_back(path);
}

// A .sync instruction executes once all live lanes that its mask names are there; false: this path waits for others.
bool Warp::gather_members(const Operation& operation, uint32_t& mask) {
    const uint32_t named = reg<uint32_t>(operation.member_mask)[__builtin_ctz(mask)];
    if ((mask & ~named) != 0) {
        throw Fault("divergence", "the member mask " + hex(named) + " lacks the lane that executes the instruction",
                    __builtin_ctz(mask & ~named));
    }
    const uint32_t needed = named & live_;
    if ((needed & ~mask) == 0) return true;
    uint32_t here = mask;
    const auto waits_here = [&](const Path& path) {
        return path.state == Path::State::kMembers && path.pc == path_.pc && path.frame == path_.frame;
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
    path_.state = state;
    path_.waiting_mask = mask;
    return Next::kBlocked;
}

void Warp::retry(Path::State state) {
    if (path_.mask != 0 && path_.state == state) path_.state = Path::State::kReady;  // it has just begun to wait
    for (Path& path : paths_) {
        if (path.state == state) path.state = Path::State::kReady;
    }
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
