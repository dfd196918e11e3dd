// ldmatrix and stmatrix. PTX ISA, "Warp Level Matrix Multiply-Accumulate Instructions".
#include "addresses.h"
#include "families.h"

namespace emulator {
namespace {

// 8 x 8 matrices of 16-bit elements in memory: lane 8m + i has the address of row i of matrix m. In registers, lane 4g
// + t holds elements 2t and 2t + 1 of row g, or of column g if transposed. r: one for each matrix, then the address.
// option[0]: number of matrices; option[1]: 1 transposes; option[2]: space.

struct Rows {
    uint16_t element[kWarpSize][8];
    uint16_t& at(int matrix, int major, int minor, bool transposed) {
        return transposed ? element[8 * matrix + minor][major] : element[8 * matrix + major][minor];
    }
};

uint32_t providers(int count) {
    return count == 4 ? kAllLanes : (1u << (8 * count)) - 1;
}

Next ldmatrix(Warp& warp, const Operation& o, uint32_t mask) {
    const int count = o.option[0];
    uint64_t addresses[kWarpSize];
    lane_addresses(warp, o, o.r[count], mask, addresses);
    Rows rows;
    const auto space = static_cast<Space>(o.option[2]);
    each_lane(providers(count), [&](int lane) {
        std::memcpy(rows.element[lane], warp.access(space, addresses[lane], 16, lane, false), 16);
    });
    for (int m = 0; m < count; ++m) {
        uint32_t* d = warp.reg<uint32_t>(o.r[m]);
        for (int lane = 0; lane < kWarpSize; ++lane) {
            const uint16_t low = rows.at(m, lane / 4, lane % 4 * 2, o.option[1] != 0);
            const uint16_t high = rows.at(m, lane / 4, lane % 4 * 2 + 1, o.option[1] != 0);
            d[lane] = low | uint32_t{high} << 16;
        }
    }
    warp.count_memory(o, space, addresses, 16, providers(count));
    return Next::kContinue;
}

Next stmatrix(Warp& warp, const Operation& o, uint32_t mask) {
    const int count = o.option[0];
    uint64_t addresses[kWarpSize];
    lane_addresses(warp, o, o.r[count], mask, addresses);
    Rows rows;
    for (int m = 0; m < count; ++m) {
        const uint32_t* a = warp.reg<uint32_t>(o.r[m]);
        for (int lane = 0; lane < kWarpSize; ++lane) {
            rows.at(m, lane / 4, lane % 4 * 2, o.option[1] != 0) = static_cast<uint16_t>(a[lane]);
            rows.at(m, lane / 4, lane % 4 * 2 + 1, o.option[1] != 0) = static_cast<uint16_t>(a[lane] >> 16);
        }
    }
    const auto space = static_cast<Space>(o.option[2]);
    each_lane(providers(count), [&](int lane) {
        const Located at = warp.locate(space, addresses[lane], 16, lane, true);
        warp.touch_by_store(at, 16, lane, reinterpret_cast<const std::byte*>(rows.element[lane]));
        std::memcpy(at.host, rows.element[lane], 16);
    });
    warp.count_memory(o, space, addresses, 16, providers(count));
    return Next::kContinue;
}

void decode_matrix_memory(Decoder& d, size_t matrices, size_t memory) {
    Operation& o = d.operation();
    d.require_any({"sync"});
    d.require_any({"aligned"});
    d.require_any({"m8n8"});
    const int count = 1 << d.require_any({"x1", "x2", "x4"});
    o.option[1] = d.accept("trans");
    Space space = d.accept_space();
    if (space != Space::kShared && space != Space::kGeneric) d.fail("unknown state space");
    d.require_type({Type::kB16});
    d.require_operands(2, 2);
    const auto elements = d.elements(matrices);
    if (elements.size() != static_cast<size_t>(count)) d.fail("a fragment with this number of registers is unknown");
    for (int m = 0; m < count; ++m) {
        o.r[m] = matrices == 0 ? d.write(*elements[m], Type::kB32) : d.read(*elements[m], Type::kB32);
    }
    set_address(o, o.r[count], d.address(memory, space));
    o.option[0] = count;
    o.option[2] = static_cast<int>(space);
    o.is_aligned = true;
    o.type = Class::kMatrixLoad;
}

}  // namespace

void decode_ldmatrix(Decoder& d) {
    decode_matrix_memory(d, 0, 1);
    d.operation().execute = ldmatrix;
}

void decode_stmatrix(Decoder& d) {
    d.require_target(90);
    decode_matrix_memory(d, 1, 0);
    d.operation().execute = stmatrix;
}

}  // namespace emulator
