// Kernels whose shared memory has the alignment that they declare, and kernels that assume a larger alignment.

#include <cstdint>

__device__ uint32_t address_of(const void* shared) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

// Copies a box of 8 by 64 halves with the 128-byte swizzle, and reads it back as if the buffer were 1024-byte aligned.
__device__ void copy_box(char* buffer, const void* map, uint16_t* out) {
    __shared__ uint64_t barrier;
    const uint32_t bar = address_of(&barrier);
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1; fence.mbarrier_init.release.cluster;" ::"r"(bar));
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 1024;" ::"r"(bar));
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {0, 0}], [%2];" ::
                "r"(address_of(buffer)),
            "l"(map), "r"(bar)
            : "memory");
    }
    __syncthreads();
    asm volatile(
        "{ .reg .pred P; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 P, [%0], 0; @!P bra AGAIN; }" ::"r"(bar)
        : "memory");
    for (int i = threadIdx.x; i < 8 * 64; i += blockDim.x) {
        const int row = i / 64, column = i % 64;
        out[i] = *reinterpret_cast<uint16_t*>(buffer + row * 128 + ((column / 8 ^ row) * 16 + column % 8 * 2));
    }
}

struct Map {
    alignas(64) char bytes[128];
};

#define COPY_BOX(ALIGNMENT)                                                                            \
    extern "C" __global__ void copies_at_##ALIGNMENT(const __grid_constant__ Map map, uint16_t* out) { \
        extern __shared__ __align__(ALIGNMENT) char buffer_##ALIGNMENT[];                              \
        copy_box(buffer_##ALIGNMENT, &map, out);                                                       \
    }
COPY_BOX(16)
COPY_BOX(128)
COPY_BOX(512)
COPY_BOX(1024)

// Rounds the buffer's address up, instead of declaring an alignment.
extern "C" __global__ void copies_rounded_up(const __grid_constant__ Map map, uint16_t* out) {
    extern __shared__ char unaligned_buffer[];
    copy_box(unaligned_buffer + (1024 - address_of(unaligned_buffer) % 1024) % 1024, &map, out);
}

// Stores the addresses of a static and a dynamic buffer and the sizes in special registers, and reads at `reads_at`.
extern "C" __global__ void looks(uint32_t* out, int reads_at) {
    __shared__ __align__(32) char fixed[48];
    extern __shared__ __align__(64) char dynamic[];
    fixed[threadIdx.x] = dynamic[threadIdx.x] = 0;
    out[0] = address_of(fixed);
    out[1] = address_of(dynamic);
    asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(out[2]));
    asm("mov.u32 %0, %%total_smem_size;" : "=r"(out[3]));
    if (reads_at >= 0) asm volatile("ld.shared.u8 %0, [%1];" : "=r"(out[4]) : "r"(reads_at));
}
