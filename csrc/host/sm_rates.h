// How fast the SMs of each architecture multiply with mma.sync and load from device memory: for planners, which weigh one
// against the other.
#pragma once

#include <cstdint>

namespace fastattn {

// Of one SM in one clock. These are data sheets' figures and other people's measurements: a wrong one costs time, not
// results.
struct SmRates {
    double macs_16bit;  // multiply-adds of mma.sync on fp16 or bf16, into fp32
    double macs_int8;   // likewise on int8, into int32
    double dram_bytes;
};

// For kernels that multiply with mma.sync, whatever faster instructions the GPU has. GPUs that are not listed count as an
// A100.
inline SmRates sm_rates(int32_t compute_capability) {
    // H200. The tensor cores do so much in each clock, whatever its rate: 989 TFLOP/s of 132 SMs are 2048 multiply-adds of
    // wgmma (4096 on int8) at 1.83 GHz, the clock of the data sheet, and mma.sync reaches 5/8 of them (Luo et al., arXiv
    // 2402.13499, measure 62 %). Device memory has a clock of its own, and the 4.8 TB/s are the fewer bytes in each clock
    // of the SMs the faster these are: 18.4 at 1.98 GHz, the highest, to which they rise in kernels that wait for memory.
    // An H100 loads 12.8 bytes.
    constexpr SmRates kHopper{1280, 2560, 18.4};
    // A100: 312 TFLOP/s, 624 TOP/s and 2.0 TB/s, 108 SMs, 1.41 GHz (data sheet).
    constexpr SmRates kAmpere{1024, 2048, 13};
    return compute_capability == 90 ? kHopper : kAmpere;
}

}  // namespace fastattn
