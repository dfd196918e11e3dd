// Computes Pᵀ from Sᵀ = K·Qᵀ, and dSᵀ from Pᵀ and dPᵀ = V·dOᵀ, on the accumulators of a warpgroup: keys are its rows,
// and query rows its columns.
#pragma once

#include <cstdint>

#include "device/fragment.cuh"
#include "device/ptx/approx.cuh"
#include "device/ptx/opaque.cuh"
#include "device/sequence.cuh"
#include "device/softmax.cuh"

namespace fastattn {

// The terms of kRows query rows, in shared memory: see RowTermsView.
template <int kRows>
struct alignas(16) TransposedRowTerms {
    float shift_log2[kRows], minus_delta[kRows];
};

// The terms of kRows query rows for the kernels with options.
template <int kRows>
struct alignas(16) TransposedOptionsTerms {
    float shift[kRows], minus_delta[kRows], log2_sum[kRows];
};

// Which query rows, from first_row on, see this lane's two keys. The rows are the accumulators' columns: bit 2 * n + e
// of seen[half] belongs to the column that is 8 * n + e after the lane's first column.
struct SeenRows {
    uint32_t seen[2];

    template <int kTilesM>
    FASTATTN_DEVICE static SeenRows of(const RowRange (&seen_by)[2], int32_t first_row, int lane) {
        static_assert(2 * kTilesM <= 32, "a register holds the bits of a key");
        SeenRows columns;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            // Opaque, so that the compiler has all bits in one register, from which it sets seven predicates at a time.
            columns.seen[half] = ptx::opaque(own_columns_of(seen_by[half], first_row, lane));
        }
        return columns;
    }

    FASTATTN_DEVICE static SeenRows all() { return {{~0u, ~0u}}; }
    FASTATTN_DEVICE void hide(int n, int e) { seen[e / 2] &= ~(1u << (2 * n + e % 2)); }
    FASTATTN_DEVICE void make_opaque() { seen[0] = ptx::opaque(seen[0]), seen[1] = ptx::opaque(seen[1]); }
    FASTATTN_DEVICE bool has(int n, int e) const { return (seen[e / 2] & 1u << (2 * n + e % 2)) != 0; }
};

// Turns rS = Sᵀ into Pᵀ. With kMasked, P is 0 where a row does not see a key, even if S is NaN there.
template <bool kMasked, int kTilesM>
FASTATTN_DEVICE void to_probabilities(float (&rS)[1][kTilesM][4], const float* shift_log2, float scale_log2,
                                      const SeenRows& columns, int lane) {
#pragma unroll
    for (int n = 0; n < kTilesM; ++n) {
        const float2 shift = reinterpret_cast<const float2*>(shift_log2)[n * kMmaN / 2 + lane % kLanesPerRow];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const float exponent = fmaf(rS[0][n][e], scale_log2, e % 2 == 0 ? -shift.x : -shift.y);
            rS[0][n][e] = ptx::ex2_approx_ftz_f32(!kMasked || columns.has(n, e) ? exponent : -kInfinity);
        }
    }
}

// Initialises dPᵀ with -delta. The products add V·dOᵀ to it, so that no instructions are needed to subtract delta
// later.
template <int kTilesM>
FASTATTN_DEVICE void start_with_delta(float (&rdP)[1][kTilesM][4], const float* minus_delta, int lane) {
#pragma unroll
    for (int n = 0; n < kTilesM; ++n) {
        const float2 own = reinterpret_cast<const float2*>(minus_delta)[n * kMmaN / 2 + lane % kLanesPerRow];
        rdP[0][n][0] = rdP[0][n][2] = own.x;
        rdP[0][n][1] = rdP[0][n][3] = own.y;
    }
}

// Turns rdP = dPᵀ - delta into dSᵀ, with rP = Pᵀ. With kMasked, dS is 0 where a row does not see a key, even if dP is
// NaN there.
template <bool kMasked, int kTilesM>
FASTATTN_DEVICE void to_score_gradients(float (&rdP)[1][kTilesM][4], const float (&rP)[1][kTilesM][4],
                                        const SeenRows& columns) {
#pragma unroll
    for (int n = 0; n < kTilesM; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const float gradient = rP[0][n][e] * rdP[0][n][e];
            rdP[0][n][e] = !kMasked || columns.has(n, e) ? gradient : 0.0f;
        }
    }
}

// Unpacks two neighbouring tiles of P, which another warpgroup has packed with accumulators_to_a().
template <DataType kDataType>
FASTATTN_DEVICE void a_to_accumulators(float (&left)[4], float (&right)[4], const uint32_t (&a)[4]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        left[2 * i] = unpack<kDataType>(static_cast<uint16_t>(a[i]));
        left[2 * i + 1] = unpack<kDataType>(static_cast<uint16_t>(a[i] >> 16));
        right[2 * i] = unpack<kDataType>(static_cast<uint16_t>(a[2 + i]));
        right[2 * i + 1] = unpack<kDataType>(static_cast<uint16_t>(a[2 + i] >> 16));
    }
}

}  // namespace fastattn
