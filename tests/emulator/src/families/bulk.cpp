// Functions that the families of asynchronous copies share.
#include "bulk.h"

#include "../cluster.h"
#include "reduction.h"

namespace emulator {
namespace {

template <typename F>
void reduce_elements(int op, std::byte* to, const std::byte* with, int64_t bytes) {
    using Bits = typename F::Bits;
    for (int64_t at = 0; at < bytes; at += sizeof(Bits)) {
        Bits b;
        std::memcpy(&b, with + at, sizeof(b));
        update<F>(to + at, op, b, b);
    }
}

}  // namespace

void add_address(Decoder& d, size_t operand, Space& space, size_t parts) {
    Operation& o = d.operation();
    const Address address = d.address(operand, space, parts);
    if (address.base_width == 4) o.option[3] |= 1 << (o.registers.size() / 2);
    o.registers.push_back(address.base);
    o.registers.push_back(d.constant(static_cast<uint64_t>(address.offset), 8));
}

uint64_t address_of(Warp& warp, const Operation& o, int index, int lane) {
    const Slot base = o.registers[2 * index];
    const uint64_t offset = warp.reg<uint64_t>(o.registers[2 * index + 1])[lane];
    if ((o.option[3] >> index & 1) != 0) return static_cast<uint32_t>(warp.reg<uint32_t>(base)[lane] + offset);
    return warp.reg<uint64_t>(base)[lane] + offset;
}

Targets find_targets(Warp& warp, Space space, uint64_t to, uint64_t mbarrier, uint32_t mask, int64_t bytes,
                     Swizzle swizzle, int alignment, int lane) {
    Targets targets;
    const SharedBox box = shared_box(warp, space, to, bytes, swizzle, alignment, lane);
    if (mask == 0) {
        const Signal signal = signal_at(warp, space, mbarrier, bytes, lane);
        if (signal.owner != box.owner) {
            throw Fault("cluster", "the mbarrier object and the destination of a copy are in different CTAs", lane);
        }
        targets.boxes.push_back(box);
        targets.signals.push_back(signal);
        return targets;
    }
    if (mask >> warp.cta.cluster.num_ctas() != 0) {
        throw Fault("cluster", "a multicast to more CTAs than the cluster has", lane);
    }
    warp.shared_owner(space, mbarrier, lane);  // replaces the address by the offset
    for (uint32_t rank = 0; mask >> rank != 0; ++rank) {
        if ((mask >> rank & 1) == 0) continue;
        const uint64_t base = (rank + 1) * kCtaBytes;
        targets.boxes.push_back(shared_box(warp, Space::kCluster, base + box.offset, bytes, swizzle, alignment, lane));
        targets.signals.push_back(signal_at(warp, Space::kCluster, base + mbarrier, bytes, lane));
    }
    return targets;
}

bool has_reduction(ElementType type, int op) {
    using E = ElementType;
    switch (op) {
        case kAdd:
            return type == E::kU32 || type == E::kS32 || type == E::kU64 || type == E::kF32 || type == E::kF64 ||
                   type == E::kF16 || type == E::kBF16;
        case kMin:
        case kMax:
            return type == E::kU32 || type == E::kS32 || type == E::kU64 || type == E::kS64 || type == E::kF16 ||
                   type == E::kBF16;
        case kInc:
        case kDec:
            return type == E::kU32;
        default:
            return type == E::kU32 || type == E::kS32 || type == E::kU64 || type == E::kS64;
    }
}

void reduce(ElementType type, int op, std::byte* to, const std::byte* with, int64_t bytes) {
    switch (type) {
        case ElementType::kU32:
            return reduce_elements<Integer<uint32_t>>(op, to, with, bytes);
        case ElementType::kS32:
            return reduce_elements<Integer<int32_t>>(op, to, with, bytes);
        case ElementType::kU64:
            return reduce_elements<Integer<uint64_t>>(op, to, with, bytes);
        case ElementType::kS64:
            return reduce_elements<Integer<int64_t>>(op, to, with, bytes);
        case ElementType::kF32:
            return reduce_elements<FlushingSingle>(op, to, with, bytes);
        case ElementType::kF64:
            return reduce_elements<Double>(op, to, with, bytes);
        case ElementType::kF16:
            return reduce_elements<Half<true>>(op, to, with, bytes);
        case ElementType::kBF16:
            return reduce_elements<Half<false>>(op, to, with, bytes);
        default:
            break;
    }
}

Effect effect_of(ElementType type, int op) {
    using E = ElementType;
    const bool is_float = type == E::kF32 || type == E::kF64 || type == E::kF16 || type == E::kBF16;
    return op == kAdd && is_float ? Effect::kSum : Effect::kReduction;
}

int require_reduction(Decoder& d) {
    constexpr int kOps[] = {kAnd, kOr, kXor, kAdd, kInc, kDec, kMin, kMax};
    return kOps[d.require_any({"and", "or", "xor", "add", "inc", "dec", "min", "max"})];
}

}  // namespace emulator
