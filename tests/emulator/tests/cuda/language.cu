// Kernels with language features of CUDA C++: printf and assert, virtual calls and function pointers, recursion,
// constant and dynamic shared memory, intrinsics of warps and of 16-bit pairs.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cassert>
#include <cstdio>

extern "C" __global__ void prints(int number, double real, const char* word) {
    printf("thread %d of %s: %5.2f|%-6d|%+d|%x|%lld|%c%%\n", threadIdx.x, word, real * threadIdx.x, number, number,
           number, 1234567890123ll * number, 'a' + threadIdx.x);
    if (threadIdx.x == 0) printf("once\n");
}

extern "C" __global__ void prints_all(int i, double x, unsigned long long address) {
    const long long wide = i;
    printf("[%d] [%05i] [%+d] [%u] [%o] [%#x] [%X]\n", i, i, i + 8, i, i, i, i);
    printf("[%f] [%.3e] [%g] [%.0E] [%a] [%8.2f] [%-8.*f]\n", x, x, x, x, x, x, 2, x);
    printf("[%llu] [%ld] [%zu] [%hhu] [%hd]\n", wide, static_cast<long>(wide), static_cast<size_t>(-wide), i, i);
    printf("[%c] [%s] [%*.3s] [%-6s|] [%p] [100%%]\n", 'x', "text", 6, "text", "text",
           reinterpret_cast<void*>(address));
}

extern "C" __global__ void asserts(const int* values) {
    assert(values[threadIdx.x] >= 0 && "negative");
}

struct Shape {
    __device__ virtual float area() const = 0;
    __device__ virtual ~Shape() {}
};
struct Square : Shape {
    float side;
    __device__ explicit Square(float side) : side(side) {}
    __device__ float area() const override { return side * side; }
};
struct Rectangle : Square {
    float other;
    __device__ Rectangle(float side, float other) : Square(side), other(other) {}
    __device__ float area() const override { return side * other; }
};
__device__ __noinline__ float area_of(const Shape& shape) {
    return shape.area();
}

extern "C" __global__ void areas(const float* sides, float* out) {
    const float side = sides[threadIdx.x];
    const Square square(side);
    const Rectangle rectangle(side, 10);
    out[threadIdx.x] = area_of(threadIdx.x % 3 == 0 ? static_cast<const Shape&>(rectangle) : square);
}

__device__ __noinline__ int twice(int x) {
    return 2 * x;
}
__device__ __noinline__ int negated(int x) {
    return -x;
}
__device__ __noinline__ int squared(int x) {
    return x * x;
}
using Function = int (*)(int);
__device__ Function functions[3] = {twice, negated, squared};
__constant__ int offsets[4] = {10, 20, 30, 40};
__device__ int* second_offset = nullptr;
__device__ int numbers[4] = {1, 2, 3, 4};
__device__ int* third_number = numbers + 2;

extern "C" __global__ void through_pointers(const int* which, int* out) {
    const int i = threadIdx.x;
    out[i] = functions[which[i]](i) + offsets[i % 4] + *third_number;
}

__device__ __noinline__ int fibonacci(int n) {
    return n < 2 ? n : fibonacci(n - 1) + fibonacci(n - 2);
}

extern "C" __global__ void recursion(int* out) {
    out[threadIdx.x] = fibonacci(threadIdx.x % 10);
}

__device__ __noinline__ int descend(const int* goes_on, int depth) {
    return *goes_on != 0 ? descend(goes_on, depth + 1) * depth + 1 : depth;
}

extern "C" __global__ void endless(int* goes_on) {
    *goes_on = descend(goes_on, 0);
}

extern "C" __global__ void allocates(float* out) {
    auto* memory = static_cast<volatile float*>(malloc(16));
    memory[threadIdx.x] = 1;
    *out = memory[0];
}

extern "C" __global__ void reversed(const float* in, float* out) {
    extern __shared__ float dynamic[];
    __shared__ float fixed[1];
    if (threadIdx.x == 0) fixed[0] = 100;
    dynamic[threadIdx.x] = in[threadIdx.x];
    __syncthreads();
    out[threadIdx.x] = dynamic[blockDim.x - 1 - threadIdx.x] + fixed[0];
}

extern "C" __global__ void warp_intrinsics(const int* in, int* out) {
    const int lane = threadIdx.x, value = in[lane];
    int* row = out + lane;
    row[0] = __shfl_up_sync(~0u, value, 3);
    row[32] = __shfl_down_sync(~0u, value, 5, 16);
    row[64] = __shfl_xor_sync(~0u, value, 9);
    row[96] = static_cast<int>(__match_any_sync(~0u, value));
    int equal = 0;
    row[128] = static_cast<int>(__match_all_sync(~0u, value & 1 | 1, &equal)) + equal;
    row[160] = static_cast<int>(__ballot_sync(~0u, value > 3)) + __popc(__activemask());
    row[192] = __reduce_add_sync(~0u, value);
    row[224] = __reduce_max_sync(~0u, value) - __reduce_min_sync(~0u, value);
    row[256] = static_cast<int>(__reduce_xor_sync(~0u, static_cast<unsigned>(value)));
    row[288] = __syncthreads_count(value > 3) * 4 + (__syncthreads_and(value > 3) != 0) * 2 +
               (__syncthreads_or(value > 3) != 0);
    row[320] = __all_sync(~0u, value < 100) * 2 + __any_sync(~0u, value == 77);
    row[352] = __ffs(value) + __clz(value) * 100 + __brev(value) % 7;
    row[384] = __dp4a(value * 0x01010101, 0x04030201, 5) + __vadd4(value, 0x01010101) + __sad(value, 9, 2u);
}

extern "C" __global__ void pairs(const __half2* a, const __half2* b, __half2* out, const __nv_bfloat162* c,
                                 const __nv_bfloat162* d, __nv_bfloat162* out_bfloat) {
    const int i = threadIdx.x;
    __half2* row = out + i;
    row[0] = __hadd2(a[i], b[i]);
    row[32] = __hmul2_sat(a[i], b[i]);
    row[64] = __hfma2(a[i], b[i], a[i]);
    row[96] = __hmax2(a[i], b[i]);
    row[128] = __hgt2(a[i], b[i]);
    row[160] = h2exp2(a[i]);
    row[192] = __habs2(__hneg2(a[i]));
    row[224] = __hfma2_relu(a[i], b[i], a[i]);
    row[256] = h2rint(a[i]);
    row[288] = __h2div(a[i], b[i]);
    row[320] = h2sqrt(__habs2(a[i]));
    __nv_bfloat162* row_bfloat = out_bfloat + i;
    row_bfloat[0] = __hadd2(c[i], d[i]);
    row_bfloat[32] = __hmul2(c[i], d[i]);
    row_bfloat[64] = __hfma2(c[i], d[i], c[i]);
    row_bfloat[96] = __hmin2(c[i], d[i]);
    row_bfloat[128] = __hge2(c[i], d[i]);
    row_bfloat[160] = __hsub2(c[i], d[i]);
}

extern "C" __global__ void rounding(const float* a, const float* b, const float* c, float* out) {
    const int i = threadIdx.x;
    float* row = out + i;
    row[0] = __fadd_rz(a[i], b[i]);
    row[32] = __fadd_ru(a[i], b[i]);
    row[64] = __fmul_rd(a[i], b[i]);
    row[96] = __fmaf_rz(a[i], b[i], c[i]);
    row[128] = __fdiv_rd(a[i], b[i]);
    row[160] = __fsqrt_ru(fabsf(a[i]));
    row[192] = __frcp_rz(a[i]);
    row[224] = __saturatef(a[i]);
    row[256] = expf(a[i]) + sinf(b[i]) + erff(c[i]) + powf(fabsf(a[i]), b[i]);
    row[288] = static_cast<float>(__fma_rd(a[i], b[i], c[i]) + exp(static_cast<double>(a[i])));
}
