// atom, red. PTX ISA, "Parallel Synchronization and Communication Instructions". They use the host's atomics, because
// CTAs run on several threads of the host.
#include <algorithm>
#include <iterator>
#include <utility>

#include "addresses.h"
#include "families.h"
#include "reduction.h"

namespace emulator {
namespace {

// Calls function(lane) for each lane of the mask. It begins with a random lane, because PTX does not define an order.
template <typename Function>
void each_lane_in_turn(Warp& warp, uint32_t mask, Function&& function) {
    const uint32_t rotation = warp.cta.random.below(kWarpSize);
    for (uint32_t i = 0; i < kWarpSize; ++i) {
        const int lane = static_cast<int>((i + rotation) % kWarpSize);
        if ((mask >> lane & 1) != 0) function(lane);
    }
}

// Throws a Fault if two lanes of an instruction add floating-point numbers to the same address, which has no fixed
// order. The race detector does not report this, because the lanes are in step.
void check_order_of_sum(const Warp& warp, const Operation& o, const uint64_t* addresses, uint32_t mask) {
    if (!o.is_sum || !warp.cta.launch.ordered_sums) return;
    std::vector<std::pair<uint64_t, int>> places;
    each_lane(mask, [&](int lane) { places.emplace_back(addresses[lane], lane); });
    std::sort(places.begin(), places.end());
    const auto found = std::adjacent_find(places.begin(), places.end(),
                                          [](const auto& a, const auto& b) { return a.first == b.first; });
    if (found == places.end()) return;
    throw Fault("race",
                "this lane and lane " + std::to_string(std::next(found)->second) +
                    " of its warp add floating numbers to the same bytes, and the order of the sum is not fixed: all "
                    "that PTX promises is that each addition is whole (PTX ISA, \"Atomicity\")",
                found->second);
}

// Checks an atomic update, reports it to the race detector, and calls function(Located) to carry it out.
template <typename Function>
void update_memory(Warp& warp, Space space, uint64_t address, int bytes, int lane, Function&& function) {
    warp.locate(space, address, bytes, lane, false);
    const Located at = warp.locate(space, address, bytes, lane, true);
    warp.touch(at, bytes, lane, true);
    warp.release(at, lane, true);
    function(at);
    warp.acquire(at, lane);
}

// Updates one number at `offset` bytes from `at`, and returns its previous bits.
template <typename F>
typename F::Bits update_at(const Located& at, size_t offset, int op, typename F::Bits b, typename F::Bits c) {
    if constexpr (std::is_same_v<F, Single>) {
        if (at.space == Space::kGlobal) return update<FlushingSingle>(at.host + offset, op, b, c);
    }
    return update<F>(at.host + offset, op, b, c);
}

// r: result, address, b, c. option: state space, ReductionOp.
template <typename F>
Next atomic(Warp& warp, const Operation& o, uint32_t mask) {
    using Bits = typename F::Bits;
    const auto space = static_cast<Space>(o.option[0]);
    uint64_t addresses[kWarpSize];
    lane_addresses(warp, o, o.r[1], mask, addresses);
    check_order_of_sum(warp, o, addresses, mask);
    const Bits *b = warp.reg<Bits>(o.r[2]), *c = warp.reg<Bits>(o.r[3]);
    Bits* d = warp.reg<Bits>(o.r[0]);
    each_lane_in_turn(warp, mask, [&](int lane) {
        update_memory(warp, space, addresses[lane], sizeof(Bits), lane,
                      [&](const Located& at) { d[lane] = update_at<F>(at, 0, o.option[1], b[lane], c[lane]); });
    });
    warp.count_memory(o, space, addresses, sizeof(Bits), mask);
    return Next::kContinue;
}

// Updates each number of a vector atomically. r: results, address, numbers of b. option[2]: how many numbers.
template <typename F>
Next atomic_vector(Warp& warp, const Operation& o, uint32_t mask) {
    using Bits = typename F::Bits;
    const auto space = static_cast<Space>(o.option[0]);
    const int count = o.option[2], bytes = count * static_cast<int>(sizeof(Bits));
    uint64_t addresses[kWarpSize];
    lane_addresses(warp, o, o.r[count], mask, addresses);
    check_order_of_sum(warp, o, addresses, mask);
    each_lane_in_turn(warp, mask, [&](int lane) {
        Bits b[8];  // read first, because a result may have the same register
        for (int i = 0; i < count; ++i) b[i] = warp.reg<Bits>(o.r[count + 1 + i])[lane];
        update_memory(warp, space, addresses[lane], bytes, lane, [&](const Located& at) {
            for (int i = 0; i < count; ++i) {
                warp.reg<Bits>(o.r[i])[lane] = update_at<F>(at, i * sizeof(Bits), o.option[1], b[i], b[i]);
            }
        });
    });
    warp.count_memory(o, space, addresses, bytes, mask);
    return Next::kContinue;
}

// .exch and .cas of 16 bytes.
Next atomic_wide(Warp& warp, const Operation& o, uint32_t mask) {
    __extension__ using Bits = unsigned __int128;
    const auto space = static_cast<Space>(o.option[0]);
    uint64_t addresses[kWarpSize];
    lane_addresses(warp, o, o.r[1], mask, addresses);
    const Bits *b = warp.reg<Bits>(o.r[2]), *c = warp.reg<Bits>(o.r[3]);
    Bits* d = warp.reg<Bits>(o.r[0]);
    each_lane_in_turn(warp, mask, [&](int lane) {
        update_memory(warp, space, addresses[lane], sizeof(Bits), lane, [&](const Located& located) {
            auto* at = reinterpret_cast<Bits*>(located.host);
            if (o.option[1] == kCas) {
                d[lane] = __sync_val_compare_and_swap(at, b[lane], c[lane]);
                return;
            }
            Bits old = 0;
            for (Bits seen; (seen = __sync_val_compare_and_swap(at, old, b[lane])) != old;) old = seen;
            d[lane] = old;
        });
    });
    warp.count_memory(o, space, addresses, sizeof(Bits), mask);
    return Next::kContinue;
}

Execute pick_vector(Type type, int op) {
    const bool has_order = op == kMin || op == kMax;
    if (op != kAdd && !has_order) return nullptr;
    switch (type) {
        case Type::kF32:
            return has_order ? nullptr : atomic_vector<Single>;
        case Type::kF16:
            return atomic_vector<Half<true>>;
        case Type::kBF16:
            return atomic_vector<Half<false>>;
        case Type::kF16x2:
            return atomic_vector<HalfPair<true>>;
        case Type::kBF16x2:
            return atomic_vector<HalfPair<false>>;
        default:
            return nullptr;
    }
}

void decode_vector_atom(Decoder& d, Space space, int op, Type type, int count, bool returns) {
    Operation& o = d.operation();
    d.require_target(90);
    if (space != Space::kGlobal && space != Space::kGeneric) d.fail("unknown state space for a vector");
    if (count * width_of(type) > 16 || (count == 8 && width_of(type) != 2)) d.fail("a vector of an unknown form");
    const size_t first = returns ? 1 : 0;
    const Type bits = bits_of_width(width_of(type));
    const auto sources = d.elements(first + 1);
    if (static_cast<int>(sources.size()) != count) d.fail("a vector of another length than the modifier says");
    for (int i = 0; i < count; ++i) {
        o.r[count + 1 + i] = d.read(*sources[i], type == Type::kF32 ? type : bits);
        if (!returns) o.r[i] = d.scratch(width_of(type));
    }
    if (returns) {
        const auto results = d.elements(0);
        if (static_cast<int>(results.size()) != count) d.fail("a vector of another length than the modifier says");
        for (int i = 0; i < count; ++i) o.r[i] = d.write(*results[i], bits);
    }
    set_address(o, o.r[count], d.address(first, space));
    o.option[0] = static_cast<int>(space), o.option[1] = op, o.option[2] = count;
    o.execute = pick_vector(type, op);
    if (o.execute == nullptr) d.fail("unknown operation for this type");
}

}  // namespace

void decode_atom(Decoder& d) {
    Operation& o = d.operation();
    const bool returns = d.root() == "atom";
    if (!returns && d.accept("async")) return decode_red_async(d);
    accept_order_and_scope(d, Order::kRelaxed);
    Space space = d.accept_space();
    const bool has_policy = d.accept("L2::cache_hint"), without_flush = d.accept("noftz");
    const int op = d.require_any({"and", "or", "xor", "exch", "add", "inc", "dec", "min", "max", "cas"});
    const int vector = d.accept_any({"v2", "v4", "v8"});
    const Type type = d.require_type();
    if (without_flush != (width_of(type) == 2 || is_packed(type)) && is_float(type)) d.fail("unknown for this type");
    const size_t sources = op == kCas ? 2 : 1, first = returns ? 1 : 0;
    d.require_operands(first + 1 + sources + has_policy, first + 1 + sources + has_policy);
    if (!returns && (op == kCas || op == kExch)) d.fail("unknown operation");
    o.type = Class::kAtomic;
    o.is_sum = op == kAdd && is_float(type);
    if (vector >= 0) return decode_vector_atom(d, space, op, type, 2 << vector, returns);
    const Type bits = bits_of_width(width_of(type));
    o.r[0] = returns ? d.write(0, bits) : d.scratch(width_of(type));
    set_address(o, o.r[1], d.address(first, space));
    o.r[2] = d.read(first + 1, is_float(type) ? type : bits);
    o.r[3] = op == kCas ? d.read(first + 2, bits) : o.r[2];
    o.option[0] = static_cast<int>(space), o.option[1] = op;
    const bool is_logic = op <= kExch || op == kCas, is_order = op == kMin || op == kMax;
    switch (type) {
        case Type::kB16:
            if (op == kCas) o.execute = atomic<Integer<uint16_t>>;
            break;
        case Type::kB32:
            if (is_logic) o.execute = atomic<Integer<uint32_t>>;
            break;
        case Type::kB64:
            if (is_logic) o.execute = atomic<Integer<uint64_t>>;
            break;
        case Type::kB128:
            d.require_target(90);
            if (op == kCas || op == kExch) o.execute = atomic_wide;
            break;
        case Type::kU32:
            if (!is_logic) o.execute = atomic<Integer<uint32_t>>;
            break;
        case Type::kS32:
            if (op == kAdd || is_order) o.execute = atomic<Integer<int32_t>>;
            break;
        case Type::kU64:
            if (op == kAdd || is_order) o.execute = atomic<Integer<uint64_t>>;
            break;
        case Type::kS64:
            if (is_order) o.execute = atomic<Integer<int64_t>>;
            break;
        case Type::kF32:
            if (op == kAdd) o.execute = atomic<Single>;
            break;
        case Type::kF64:
            if (op == kAdd) o.execute = atomic<Double>;
            break;
        case Type::kF16:
            if (op == kAdd) o.execute = atomic<Half<true>>;
            break;
        case Type::kBF16:
            if (op == kAdd) o.execute = atomic<Half<false>>;
            break;
        case Type::kF16x2:
            if (op == kAdd) o.execute = atomic<HalfPair<true>>;
            break;
        case Type::kBF16x2:
            if (op == kAdd) o.execute = atomic<HalfPair<false>>;
            break;
        default:
            break;
    }
    if (o.execute == nullptr) d.fail("unknown operation for this type");
}

}  // namespace emulator
