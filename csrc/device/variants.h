// Variants of kernels: only measurements on a GPU can show which is faster. A build for measurements chooses variants
// by nvcc's -D; other builds have these defaults. docs/environment.md says how to build them (NVCC_APPEND_FLAGS).
#pragma once

// n > 0: of each n exponentials, the plain forward kernel for Hopper computes one by exp2_on_fma(), to relieve the MUFU
// pipe. 0: none.
#ifndef FASTATTN_EXP2_ON_FMA
#define FASTATTN_EXP2_ON_FMA 0
#endif

// 1: the plain forward kernel for Hopper waits for P·V before it checks whether a softmax reference is outgrown. ptxas
// then moves the wait up among the exponentials, and fewer of them overlap P·V. Tiles with kMasksInPlace always wait
// early, because they have too few registers.
#ifndef FASTATTN_WAITS_EARLY
#define FASTATTN_WAITS_EARLY 0
#endif

// 1: without options and `deterministic`, the backward kernel for up to 128 dims adds dQ to its sums straight from
// registers. 0: dQ goes through shared memory. Shared memory is busier in this kernel than the tensor cores, but no
// consumer has to wait until the L2 cache takes the additions.
#ifndef FASTATTN_DQ_FROM_REGISTERS
#define FASTATTN_DQ_FROM_REGISTERS 0
#endif
