#include "wgmma.h"

#include <algorithm>

#include "cluster.h"
#include "families/floating.h"

namespace emulator {
namespace {

constexpr uint32_t kPoison = 0xffffffff;  // NaN, also of fp16

[[noreturn]] void fail(const std::string& message) {
    throw Fault("wgmma", message, 0);
}

}  // namespace

// In every 8 columns, lane 4g + t holds columns 2t and 2t + 1 of rows g and g + 8; fp16 has two elements per register.
void WgmmaSums::load(int element, const uint32_t* lanes) {
    for (int lane = 0; lane < kWarpSize; ++lane) {
        const int parts = is_half ? 2 : 1;
        for (int part = 0; part < parts; ++part) {
            const int i = element * parts + part;
            const int at = (lane / 4 + i / 2 % 2 * 8) * columns + i / 4 * 8 + lane % 4 * 2 + i % 2;
            if (is_integer) {
                integers[at] = static_cast<int32_t>(lanes[lane]);
            } else {
                values[at] = is_half ? from_half(static_cast<uint16_t>(lanes[lane] >> (16 * part)))
                                     : bit_cast<float>(lanes[lane]);
            }
        }
    }
}

void WgmmaSums::store(int element, uint32_t* lanes) const {
    for (int lane = 0; lane < kWarpSize; ++lane) {
        const int parts = is_half ? 2 : 1;
        uint32_t bits = 0;
        for (int part = 0; part < parts; ++part) {
            const int i = element * parts + part;
            const int at = (lane / 4 + i / 2 % 2 * 8) * columns + i / 4 * 8 + lane % 4 * 2 + i % 2;
            if (is_integer) {
                bits = static_cast<uint32_t>(integers[at]);
            } else {
                bits |= is_half ? uint32_t{to_half(values[at])} << (16 * part) : bit_cast<uint32_t>(values[at]);
            }
        }
        lanes[lane] = bits;
    }
}

WgmmaUnit::Register& WgmmaUnit::state(Frame* frame, const TrackedRegister& reg) {
    if (frame != last_frame_) {
        last_registers_ = &registers_[frame];
        last_registers_->resize(frame->code->num_tracked);
        last_frame_ = frame;
    }
    return (*last_registers_)[reg.id];
}

void WgmmaUnit::forget_name(Frame* frame, const TrackedRegister& reg, Register& state) {
    auto& names = state.sums->names;
    names.erase(std::find_if(names.begin(), names.end(), [&](const WgmmaSums::Name& name) {
        return name.frame == frame && name.reg.slot == reg.slot;
    }));
    state.sums = nullptr;
}

void WgmmaUnit::read(Register& state) const {
    if (state.sums != nullptr) fail("an accumulator of wgmma.mma_async is read before wgmma.wait_group covers it");
    if (state.is_stale) {
        fail("a copy of an accumulator is read that a mov made while wgmma.mma_async was under way");
    }
    if (is_input(state)) {
        fail("a register of wgmma.mma_async's matrix A is read before wgmma.wait_group covers the instruction");
    }
}

// A register may be overwritten if its accumulator in flight has another name.
void WgmmaUnit::write(Frame* frame, const TrackedRegister& reg) {
    Register& to = state(frame, reg);
    if (to.sums != nullptr) {
        const auto& names = to.sums->names;
        const auto same = [&](const WgmmaSums::Name& name) { return name.element == to.element; };
        if (std::count_if(names.begin(), names.end(), same) == 1) {
            fail("an accumulator of wgmma.mma_async is written before wgmma.wait_group covers it");
        }
        forget_name(frame, reg, to);
    }
    if (is_input(to)) {
        fail("a register of wgmma.mma_async's matrix A is written before wgmma.wait_group covers the instruction");
    }
    to.is_stale = false;
    to.written_at = num_fences_ + 1;
}

void WgmmaUnit::move(Frame* frame, const TrackedRegister& from, const TrackedRegister& to, uint32_t mask) {
    const Register source = state(frame, from);
    if (source.is_stale) read(state(frame, from));
    if (source.sums != nullptr && state(frame, to).sums == source.sums && state(frame, to).element == source.element) {
        return;
    }
    write(frame, to);
    Register& target = state(frame, to);
    target.written_at = source.written_at;
    if (source.sums == nullptr) return;
    if (mask != warp_.live())
        fail("some lanes move an accumulator of wgmma.mma_async before wgmma.wait_group covers it");
    target.sums = source.sums;
    target.element = source.element;
    source.sums->names.push_back({frame, to, source.element});
}

void WgmmaUnit::touch(const Operation& operation, uint32_t mask) {
    const TrackedAccess& access = warp_.cta.launch.program->tracked_accesses[operation.tracked];
    if (access.is_wgmma) return;
    Frame* const frame = warp_.frame();
    if (access.is_move && access.reads.size() == 1 && access.writes.size() == 1) {
        return move(frame, access.reads[0], access.writes[0], mask);
    }
    for (const TrackedRegister& reg : access.reads) read(state(frame, reg));
    for (const TrackedRegister& reg : access.writes) write(frame, reg);
}

void WgmmaUnit::leave(Frame* frame) {
    for (const auto& sums : sums_) {
        for (const WgmmaSums::Name& name : sums->names) {
            if (name.frame == frame) fail("a function returns before wgmma.wait_group covers its wgmma.mma_async");
        }
    }
    registers_.erase(frame);
    last_frame_ = nullptr;
}

// Returns the accumulators of an instruction: those in flight in its registers, or new ones with the registers' values.
WgmmaSums& WgmmaUnit::sums_of(const TrackedAccess& access, const WgmmaSums& form, Frame* frame) {
    WgmmaSums* const known = state(frame, access.writes[0]).sums;
    for (size_t i = 0; i < access.writes.size(); ++i) {
        const Register& reg = state(frame, access.writes[i]);
        if (is_input(reg)) fail("an accumulator that a wgmma.mma_async under way has in its matrix A");
        if (reg.sums != known || (known != nullptr && reg.element != static_cast<int>(i))) {
            fail("some accumulators are under way as other ones: wgmma.wait_group has to come between");
        }
        if (known == nullptr && reg.is_stale) read(state(frame, access.writes[i]));
        if (known == nullptr && reg.written_at > num_fences_) {
            fail("an accumulator was written after the last wgmma.fence");
        }
    }
    if (known != nullptr) {
        if (known->columns != form.columns || known->depth != form.depth || known->is_half != form.is_half ||
            known->is_integer != form.is_integer) {
            fail("the accumulators are under way in a wgmma.mma_async of another shape");
        }
        return *known;
    }
    auto& sums = *sums_.emplace_back(std::make_unique<WgmmaSums>(form));
    sums.values.resize(sums.is_integer ? 0 : 16 * sums.columns);
    sums.integers.resize(sums.is_integer ? 16 * sums.columns : 0);
    for (int i = 0; i < sums.lane_elements(); ++i) {
        const TrackedRegister& reg = access.writes[i];
        if (state(frame, reg).sums != nullptr) fail("a register is two accumulators");
        auto* const lanes = reinterpret_cast<uint32_t*>(frame->registers.get() + reg.slot);
        sums.load(i, lanes);
        std::fill(lanes, lanes + kWarpSize, kPoison);
        state(frame, reg).sums = &sums;
        state(frame, reg).element = i;
        sums.names.push_back({frame, reg, i});
    }
    return sums;
}

template <typename Function>
void WgmmaUnit::each_of_warpgroup(Function&& function) const {
    const auto& warps = warp_.cta.warps();
    const size_t first = warp_.thread(0) / kWarpSize / 4 * 4;
    for (size_t i = first; i < first + 4; ++i) function(*warps[i]);
}

bool WgmmaUnit::tells_of(int warp) const {
    return !warp_.cta.launch.wgmma_waits_by_warp || warp == warp_.thread(0) / kWarpSize % 4;
}

void WgmmaUnit::issue(const Operation& operation, const WgmmaSums& form, WgmmaCompute compute) {
    const TrackedAccess& access = warp_.cta.launch.program->tracked_accesses[operation.tracked];
    Frame* const frame = warp_.frame();
    if (num_fences_ == 0) fail("the first wgmma.mma_async comes before any wgmma.fence");
    const uint64_t number = ++issued_;
    for (const TrackedRegister& reg : access.reads) {
        Register& input = state(frame, reg);
        if (input.sums != nullptr || input.is_stale) {
            fail("a register of matrix A is an accumulator that is under way");
        }
        if (input.written_at > num_fences_) fail("a register of matrix A was written after the last wgmma.fence");
        input.input_of = number;
    }
    WgmmaSums& sums = sums_of(access, form, frame);
    sums.last = number;
    // From now on only the registers that this instruction names hold the accumulators; other names become stale.
    const auto is_other = [&](const WgmmaSums::Name& name) {
        return name.frame != frame || access.writes[name.element].slot != name.reg.slot;
    };
    for (const WgmmaSums::Name& name : sums.names) {
        if (!is_other(name)) continue;
        Register& other = state(name.frame, name.reg);
        other.sums = nullptr;
        other.is_stale = true;
    }
    sums.names.erase(std::remove_if(sums.names.begin(), sums.names.end(), is_other), sums.names.end());
    pending_.push_back({number, &sums, std::move(compute), 0});
    const AsyncEngine::Handle handle = warp_.cta.cluster.async.start(warp_, operation, 0, AsyncEngine::Latest::kBound,
                                                                     [this, number] { perform(number); });
    pending_.back().handle = handle;
    each_of_warpgroup([](Warp& warp) { warp.retry(Path::State::kWarpgroup); });
}

void WgmmaUnit::follow(AsyncId id) {
    const int warp = warp_.thread(0) / kWarpSize;
    WarpgroupLog& log = warp_.cta.warpgroup_log(warp / 4);
    const uint64_t index = issued_ - log.first_part;
    if (index == log.parts.size()) log.parts.emplace_back();
    log.parts[index][warp % 4] = id;
}

// Performs a multiplication, and before it all earlier ones.
void WgmmaUnit::perform(uint64_t number) {
    for (Multiplication& multiplication : pending_) {
        if (multiplication.number > number) break;
        if (multiplication.number <= performed_) continue;
        performed_ = multiplication.number;
        multiplication.compute(*multiplication.sums);
    }
}

void WgmmaUnit::commit() {
    groups_.push_back(issued_);
}

bool WgmmaUnit::wait(uint32_t most_pending) {
    if (groups_.size() <= most_pending) return true;
    const uint64_t covered = groups_[groups_.size() - most_pending - 1];
    bool all_have_issued = true;
    each_of_warpgroup([&](Warp& warp) { all_have_issued = all_have_issued && warp.wgmma().issued_ >= covered; });
    if (!all_have_issued) return false;
    groups_.erase(groups_.begin(), groups_.end() - most_pending);
    each_of_warpgroup([&](Warp& warp) {
        if (!tells_of(warp.thread(0) / kWarpSize % 4)) return;
        for (const Multiplication& multiplication : warp.wgmma().pending_) {
            if (multiplication.number <= covered) warp.cta.cluster.async.finish(multiplication.handle);
        }
    });
    complete(covered);
    return true;
}

void WgmmaUnit::complete(uint64_t number) {
    WarpgroupLog& log = warp_.cta.warpgroup_log(warp_.thread(0) / kWarpSize / 4);
    HappensBefore* const order = warp_.cta.cluster.order.get();
    while (!pending_.empty() && pending_.front().number <= number) {
        if (order != nullptr) {
            const auto& parts = log.parts[pending_.front().number - log.first_part];
            for (int warp = 0; warp < 4; ++warp) {
                if (tells_of(warp)) order->complete(parts[warp], warp_.acting(kAllLanes));
            }
        }
        pending_.pop_front();
    }
    completed_ = std::max(completed_, number);
    uint64_t by_all = completed_;
    each_of_warpgroup([&](Warp& warp) { by_all = std::min(by_all, warp.wgmma().completed_); });
    for (; log.first_part <= by_all && !log.parts.empty(); ++log.first_part) log.parts.pop_front();
    for (auto& sums : sums_) {
        if (sums->last > completed_) continue;
        for (const WgmmaSums::Name& name : sums->names) {
            sums->store(name.element, reinterpret_cast<uint32_t*>(name.frame->registers.get() + name.reg.slot));
            state(name.frame, name.reg).sums = nullptr;
        }
        sums.reset();
    }
    sums_.erase(std::remove(sums_.begin(), sums_.end(), nullptr), sums_.end());
}

void WgmmaUnit::check_warpgroup() const {
    const size_t first = warp_.thread(0) / kWarpSize / 4 * 4;
    const auto& warps = warp_.cta.warps();
    if (first + 4 > warps.size()) fail("the warpgroup has fewer than 4 warps");
    for (size_t i = first; i < first + 4; ++i) {
        if (warps[i]->lanes() != kAllLanes) fail("a warp of the warpgroup has fewer than 32 threads");
    }
    if (warp_.live() != kAllLanes) fail("some threads of the warp have exited");
}

void WgmmaUnit::log(const WarpgroupLog::Entry& entry) {
    const int warp = warp_.thread(0) / kWarpSize;
    WarpgroupLog& log = warp_.cta.warpgroup_log(warp / 4);
    uint64_t& position = log.position[warp % 4];
    if (position - log.first == log.entries.size()) log.entries.push_back(entry);
    const WarpgroupLog::Entry& other = log.entries[position - log.first];
    ++position;
    if (other.operation != entry.operation) {
        fail("the warps of the warpgroup execute different wgmma instructions: another one executed line " +
             std::to_string(other.operation->instruction->line) + " in this place");
    }
    if (other.adds != entry.adds || !std::equal(other.descriptors, other.descriptors + 2, entry.descriptors)) {
        fail("the warps of the warpgroup execute this with different descriptors or another scale-d");
    }
    const uint64_t passed = *std::min_element(log.position, log.position + 4);
    for (; log.first < passed; ++log.first) log.entries.pop_front();
}

}  // namespace emulator
