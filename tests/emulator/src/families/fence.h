// What a fence or membar says. Memory is sequentially consistent here; who checks orders and proxies reads it from the
// operation.
#pragma once

#include <cstdint>

namespace emulator {

enum class FenceOrder : uint8_t { kSequential, kAcquireRelease, kAcquire, kRelease };

enum class FenceScope : uint8_t { kCta, kCluster, kGpu, kSystem };

enum class FenceKind : uint8_t {
    kMemory,
    kMbarrierInit,
    kProxyAlias,
    kProxyAsync,           // generic and async accesses to every state space
    kProxyAsyncGlobal,     // … to one
    kProxyAsyncShared,     // … of the CTA
    kProxyAsyncCluster,    // … of the cluster
    kProxyAsyncToGeneric,  // .async::generic
    kProxyTensormap,       // .tensormap::generic; acquire: of 128 bytes at the address in r[0]
};

// Where an operation keeps them: option[0] a FenceOrder, option[1] a FenceScope, option[2] a FenceKind, and option[3]
// for kProxyTensormap with acquire as set_address has it.
}  // namespace emulator
