// cp.async and its groups. PTX ISA, "Data Movement and Conversion Instructions: Non-bulk copy".
#include "addresses.h"
#include "bulk.h"
#include "families.h"

namespace emulator {
namespace {

// r: shared address, global address, bytes to read or a predicate. value, option[3]: the destination's offset and the
// width of its base. option[0]: bytes; option[1]: the source's offset, which compilers keep small; option[2]: a Reads.
enum Reads : int { kAll, kSome, kNoneIf, kNoneUnless };  // kSome: r[2] bytes; kNoneIf, kNoneUnless: r[2] is a predicate

Next copy(Warp& warp, const Operation& o, uint32_t mask) {
    AsyncCopy copy{};
    copy.mask = mask;
    copy.bytes = o.option[0];
    lane_addresses(warp, o, o.r[0], mask, copy.shared);
    const uint64_t* from = warp.reg<uint64_t>(o.r[1]);
    const uint32_t* bytes = warp.reg<uint32_t>(o.r[2]);
    const uint32_t ignored = o.option[2] == kNoneIf       ? warp.predicate(o.r[2])
                             : o.option[2] == kNoneUnless ? ~warp.predicate(o.r[2])
                                                          : 0;
    uint32_t reading = 0;
    each_lane(mask, [&](int lane) {
        copy.global[lane] = from[lane] + static_cast<uint64_t>(static_cast<int64_t>(o.option[1]));
        const uint32_t all = (ignored >> lane & 1) != 0 ? 0 : static_cast<uint32_t>(copy.bytes);
        const uint32_t wanted = o.option[2] == kSome ? bytes[lane] : all;
        if (wanted > static_cast<uint32_t>(copy.bytes)) {
            throw Fault(
                "out-of-bounds",
                "cp.async: " + std::to_string(wanted) + " bytes to read of a copy of " + std::to_string(copy.bytes),
                lane);
        }
        copy.source_bytes[lane] = static_cast<uint8_t>(wanted);
        copy.shared[lane] = warp.locate(Space::kShared, copy.shared[lane], copy.bytes, lane, true).address;
        if (wanted == 0) return;
        reading |= 1u << lane;
        if (copy.global[lane] % copy.bytes != 0) {
            throw Fault("misaligned", "the source of cp.async is no multiple of " + std::to_string(copy.bytes), lane);
        }
        warp.global(copy.global[lane], wanted, lane, false);
    });
    if (reading != 0) warp.count_memory(o, Space::kGlobal, copy.global, copy.bytes, reading);
    warp.count_memory(o, Space::kShared, copy.shared, copy.bytes, mask);
    warp.start_copy(copy);
    return Next::kContinue;
}

Next commit(Warp& warp, const Operation&, uint32_t mask) {
    warp.commit_group(mask);
    return Next::kContinue;
}

Next wait(Warp& warp, const Operation& o, uint32_t mask) {
    warp.wait_group(mask, static_cast<uint32_t>(o.value));
    return Next::kContinue;
}

Next wait_all(Warp& warp, const Operation&, uint32_t mask) {
    warp.commit_group(mask);
    warp.wait_group(mask, 0);
    return Next::kContinue;
}

}  // namespace

void decode_cp(Decoder& d) {
    Operation& o = d.operation();
    o.type = Class::kAsync;
    const bool reduces = d.accept("reduce");
    d.require_any({"async"});
    if (reduces || d.accept("bulk")) {
        if (reduces) d.require_any({"bulk"});
        return decode_bulk(d, reduces);
    }
    if (d.accept("mbarrier")) return decode_cp_async_mbarrier(d);
    const int control = d.accept_any({"commit_group", "wait_group", "wait_all"});
    if (control >= 0) {
        d.require_operands(control == 1 ? 1 : 0, control == 1 ? 1 : 0);
        if (control == 1) o.value = d.immediate(0);
        o.execute = control == 0 ? commit : control == 1 ? wait : wait_all;
        return;
    }
    const bool bypasses_l1 = d.require_any({"ca", "cg"}) == 1;
    if (d.accept_space() != Space::kShared || d.accept_space() != Space::kGlobal) d.fail("unknown state spaces");
    const bool has_policy = d.accept("L2::cache_hint");
    d.accept_any({"L2::64B", "L2::128B", "L2::256B"});
    d.require_operands(3 + has_policy, 4 + has_policy);
    if (has_policy) d.read(d.num_operands() - 1, Type::kB64);
    const int64_t bytes = d.immediate(2);
    if (bytes != 16 && (bypasses_l1 || (bytes != 4 && bytes != 8))) d.fail("unknown size");
    Space shared = Space::kShared, global = Space::kGlobal;
    set_address(o, o.r[0], d.address(0, shared));
    const Address from = d.address(1, global);
    o.r[1] = from.base;
    o.option[0] = static_cast<int>(bytes), o.option[1] = static_cast<int>(from.offset);
    if (from.offset != o.option[1]) d.fail("an offset of more than 31 bits");
    if (d.num_operands() - has_policy == 4) {
        const bool asks = d.is_predicate(d.operand(3));
        bool negated = false;
        o.r[2] = asks ? d.read_predicate(d.operand(3), negated) : d.read(3, Type::kU32);
        o.option[2] = !asks ? kSome : negated ? kNoneUnless : kNoneIf;
    }
    o.execute = copy;
}

}  // namespace emulator
