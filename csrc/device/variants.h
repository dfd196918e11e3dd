// Variants of kernels between which only a GPU can decide. A build for measurements chooses them by nvcc's -D; other
// builds have these defaults. docs/PERFORMANCE.md has the commands.
#pragma once

// The plain forward kernel for Hopper computes one exponential in so many by exp2_on_fma(), off the MUFU pipe; 0: none.
#ifndef FASTATTN_EXP2_ON_FMA
#define FASTATTN_EXP2_ON_FMA 0
#endif

// 1: the same kernel waits for P·V before it looks whether a softmax reference is outgrown. ptxas then moves the wait up
// among the exponentials, so that fewer of them run beside the product.
#ifndef FASTATTN_WAITS_EARLY
#define FASTATTN_WAITS_EARLY 0
#endif
