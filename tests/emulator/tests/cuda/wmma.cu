// Matrix products through mma.h, one warp and one tile each.
#include <mma.h>

using namespace nvcuda;

// d[kM, kN] = a[kM, kK] b[kK, kN] + c[kM, kN]
template <int kM, int kN, int kK, typename T, typename Sum, typename LayoutA, typename LayoutB, typename Element = T>
__device__ void multiply(const Element* a, const Element* b, const Sum* c, Sum* d, wmma::layout_t layout) {
    constexpr bool kRowsA = std::is_same<LayoutA, wmma::row_major>::value;
    constexpr bool kRowsB = std::is_same<LayoutB, wmma::row_major>::value;
    wmma::fragment<wmma::matrix_a, kM, kN, kK, T, LayoutA> fragment_a;
    wmma::fragment<wmma::matrix_b, kM, kN, kK, T, LayoutB> fragment_b;
    wmma::fragment<wmma::accumulator, kM, kN, kK, Sum> sums;
    const int stride = layout == wmma::mem_row_major ? kN : kM;
    wmma::load_matrix_sync(fragment_a, a, kRowsA ? kK : kM);
    wmma::load_matrix_sync(fragment_b, b, kRowsB ? kN : kK);
    wmma::load_matrix_sync(sums, c, stride, layout);
    wmma::mma_sync(sums, fragment_a, fragment_b, sums);
    for (int i = 0; i < sums.num_elements; ++i) sums.x[i] = sums.x[i] + sums.x[i];
    wmma::store_matrix_sync(d, sums, stride, layout);
}

#define KERNEL(name, M, N, K, T, Element, Sum, A, B, layout)                                                          \
    extern "C" __global__ void name(const Element* a, const Element* b, const Sum* c, Sum* d) {                       \
        multiply<M, N, K, T, Sum, wmma::A##_major, wmma::B##_major, Element>(a, b, c, d, wmma::mem_##layout##_major); \
    }

KERNEL(half_16_16, 16, 16, 16, __half, __half, float, row, col, row)
KERNEL(half_32_8, 32, 8, 16, __half, __half, float, col, row, col)
KERNEL(half_8_32, 8, 32, 16, __half, __half, __half, row, row, row)
KERNEL(bfloat_16_16, 16, 16, 16, __nv_bfloat16, __nv_bfloat16, float, col, col, row)
KERNEL(signed_16_16, 16, 16, 16, signed char, signed char, int, row, col, row)
KERNEL(unsigned_32_8, 32, 8, 16, unsigned char, unsigned char, int, col, row, row)
KERNEL(tf32_16_16, 16, 16, 8, wmma::precision::tf32, float, float, row, col, col)
KERNEL(double_8_8, 8, 8, 4, double, double, double, row, col, row)

// out = a b, one warp for each tile of 16 x 16; the accumulator is converted element by element.
extern "C" __global__ void product(const __half* a, const __half* b, __half* out, int columns, int depth) {
    const int row = 16 * static_cast<int>(blockIdx.x), column = 16 * static_cast<int>(blockIdx.y);
    wmma::fragment<wmma::accumulator, 16, 16, 16, float> sums;
    wmma::fill_fragment(sums, 0.0f);
    for (int k = 0; k < depth; k += 16) {
        wmma::fragment<wmma::matrix_a, 16, 16, 16, __half, wmma::row_major> left;
        wmma::fragment<wmma::matrix_b, 16, 16, 16, __half, wmma::row_major> right;
        wmma::load_matrix_sync(left, a + row * depth + k, depth);
        wmma::load_matrix_sync(right, b + k * columns + column, columns);
        wmma::mma_sync(sums, left, right, sums);
    }
    wmma::fragment<wmma::accumulator, 16, 16, 16, __half> narrow;
    for (int i = 0; i < sums.num_elements; ++i) narrow.x[i] = __float2half(sums.x[i]);
    wmma::store_matrix_sync(out + row * columns + column, narrow, columns, wmma::mem_row_major);
}
