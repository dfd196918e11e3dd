// A warp's frames: registers, special registers and local memory of the functions that its lanes execute.
#include <algorithm>

#include "cluster.h"
#include "wgmma.h"

namespace emulator {
namespace {

constexpr int64_t kMostLocalBytes = 512 << 10;  // of a thread: the hardware's limit

}  // namespace

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
    const uint32_t num_ranks = launch.cluster[0] * launch.cluster[1] * launch.cluster[2];
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
                    value = launch.program->static_shared_bytes + launch.shared_bytes;
                    break;
                case Special::kLocalBase:
                    value = frame->local_base + i;
                    break;
                case Special::kSharedBase:  // in a cluster, an address tells whose shared memory it is in
                    value = i + (num_ranks > 1 ? (cta.rank + uint64_t{1}) * kCtaBytes : 0);
                    break;
                case Special::kEnvironment:  // the upper or the lower half of an address
                    value = i == 1 ? launch.grid_workspace >> 32 : launch.grid_workspace & 0xffffffff;
                    break;
                case Special::kSmid:  // CTAs are assigned to SMs round-robin
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
                    value = num_ranks;
                    break;
            }
            std::memcpy(frame->registers.get() + special.slot + lane * special.width, &value, special.width);
        }
    }
    frames_.push_back(std::move(frame));
    return frames_.back().get();
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
    // Lanes that do not call, and lanes that call different functions, are separate paths until after the call.
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

// Moves a path to the beginning of a function, in a new frame with the call's arguments.
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

}  // namespace emulator
