// A kernel whose CTAs end with arrivals at a barrier that nobody waits for. nvcc's command line defines NUM_CTAS.
#include <cuda_runtime.h>

__global__ void leave_arrivals() {
    if (threadIdx.x < 32) asm volatile("bar.arrive 2, 64;");
}

extern "C" int run_leave_arrivals() {
    leave_arrivals<<<NUM_CTAS, 64>>>();
    return cudaGetLastError();
}
