// How fast the SMs of each architecture multiply and load from memory, for the choice of tiles and schedules.
#pragma once

#include <cstdint>

namespace fastattn {

// The rates of one SM in one clock, from data sheets and published measurements. A wrong rate costs time, not accuracy.
struct SmRates {
    double macs_16bit;                         // multiply-adds of mma.sync on fp16 or bf16, into fp32
    double macs_int8;                          // likewise on int8, into int32
    double wgmma_macs_16bit, wgmma_macs_int8;  // likewise of wgmma; 0 on GPUs without it
    double cublas_macs_16bit;                  // that cuBLAS reaches in large matmuls
    double dram_bytes;
    double l2_bytes;
    double gigahertz;
};

// Returns a GPU's rates; a GPU that is not listed gets an A100's. A rate of L2 without a source is an assumption.
inline SmRates sm_rates(int32_t compute_capability) {
    // H200. The data sheet's 989 TFLOP/s at 1.83 GHz are 2048 multiply-adds of wgmma in a clock of each of 132 SMs
    // (4096 on int8). mma.sync reaches about two thirds of them (Luo et al., arXiv 2402.13499, measure 62 %). cuBLAS
    // has shown 770 to 800 of these TFLOP/s on random data. 4.8 TB/s of device memory are 19.9 bytes in a clock (an
    // H100's 3.35 TB/s are 13.9). Matmuls get 47 to 64 bytes from the L2 cache of a GH200, which has the same GPU
    // (measured by others).
    constexpr SmRates kHopper{1365, 2730, 2048, 4096, 1620, 19.9, 50, 1.83};
    // A100: 312 TFLOP/s, 624 TOP/s and 2.0 TB/s, 108 SMs, 1.41 GHz (data sheet), 5120 bytes of L2 in a clock (A100
    // white paper). cuBLAS is assumed to reach 85 %.
    constexpr SmRates kAmpere{1024, 2048, 0, 0, 870, 13, 47, 1.41};
    // RTX 3090, 4090: 71 and 165 TFLOP/s into fp32, 284 and 660 TOP/s, 0.94 and 1.0 TB/s, 82 and 128 SMs, 1.7 and 2.52
    // GHz (data sheets). cuBLAS is assumed to reach 90 %.
    constexpr SmRates kAmpereConsumer{256, 1024, 0, 0, 230, 6.7, 24, 1.70};
    constexpr SmRates kAda{256, 1024, 0, 0, 230, 3.1, 24, 2.52};
    // B200: 2250 TFLOP/s, 8 TB/s, 148 SMs, 1.85 GHz (data sheet). cuBLAS is assumed to reach three quarters, and
    // mma.sync an A100's rate.
    constexpr SmRates kBlackwell{1024, 2048, 0, 0, 3080, 29, 40, 1.85};
    // RTX 5090: 209 TFLOP/s into fp32, 838 TOP/s, 1.8 TB/s, 170 SMs, 2.41 GHz (data sheet). cuBLAS: 90 % assumed.
    constexpr SmRates kBlackwellConsumer{256, 1024, 0, 0, 230, 4.4, 24, 2.41};
    switch (compute_capability) {
        case 86:
            return kAmpereConsumer;
        case 89:
            return kAda;
        case 90:
            return kHopper;
        case 100:
        case 103:
            return kBlackwell;
        case 120:
        case 121:
            return kBlackwellConsumer;
        default:
            return kAmpere;
    }
}

}  // namespace fastattn
