// Matrices in shared memory, as wgmma's descriptors define them. PTX ISA, "Asynchronous Warpgroup Level Matrix Shared
// Memory Layout".
#pragma once

#include "../machine.h"

namespace emulator {

struct MatrixDescriptor {
    explicit MatrixDescriptor(uint64_t bits);  // throws a Fault if the descriptor is invalid

    uint64_t start, leading, stride;  // bytes
    uint32_t base_offset;
    int swizzle;  // bytes of a row of the pattern: 16 (none), 32, 64 or 128

    // Returns the address of a 16-byte chunk of a K-major matrix: half `half` of the 32 bytes of row `row` (of M or N).
    uint64_t k_major(int row, int half) const;
    // Returns the address of a 16-byte chunk of an MN-major matrix: rows 8 · `rows` to 8 · `rows` + 7 at column `k`.
    uint64_t mn_major(int rows, int k) const;
    // Throws a Fault unless the `rows` contiguous 16-bit elements along M or N of an MN-major matrix are whole swizzle
    // atoms, or lie within one atom. Triton emits the latter when several warpgroups split N.
    void require_whole_atoms(int rows, const char* which) const;

  private:
    // The swizzle xors the number of a 16-byte chunk in its 128-byte row with bits of the row's number.
    uint64_t swizzled(uint64_t offset) const {
        const uint64_t address = start + offset;
        const uint64_t row = (address >> 7) - base_offset;
        return address ^ ((row & (swizzle / 16 - 1)) << 4);
    }
};

// Returns the 16 bytes that wgmma reads at an address. Throws a Fault if it may not. `which`: "A" or "B".
const std::byte* wgmma_chunk(Cta& cta, uint64_t address, const char* which);

// Calls function(address, row - first, k) for each 16-byte chunk of rows [first, first + rows). A chunk begins with
// element (row, k) and holds `each` elements, along M or N if the matrix is MN-major, else along K.
template <typename Function>
void each_chunk(const MatrixDescriptor& matrix, bool is_mn_major, int first, int rows, int each, Function&& function) {
    if (is_mn_major) {
        for (int k = 0; k < 2 * each; ++k) {
            for (int row = 0; row < rows; row += each) function(matrix.mn_major((first + row) / each, k), row, k);
        }
    } else {
        for (int row = 0; row < rows; ++row) {
            for (int half = 0; half < 2; ++half) function(matrix.k_major(first + row, half), row, half * each);
        }
    }
}

// Reads rows [first, first + rows) of M or N. Element (row, k) goes to out[(row - first) * row_step + k * k_step].
template <typename Format, typename T>
void read_matrix(Cta& cta, const MatrixDescriptor& matrix, bool is_mn_major, int first, int rows, const char* which,
                 T* out, int row_step, int k_step) {
    constexpr int kEach = 16 / Format::kBytes;
    const int step = is_mn_major ? row_step : k_step;
    each_chunk(matrix, is_mn_major, first, rows, kEach, [&](uint64_t address, int row, int k) {
        const std::byte* chunk = wgmma_chunk(cta, address, which);
        T* const to = out + row * row_step + k * k_step;
        for (int i = 0; i < kEach; ++i) to[i * step] = Format::get(chunk, i);
    });
}

}  // namespace emulator
