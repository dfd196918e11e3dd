// The order, scope and kind of a fence or membar. Only the race detector uses them, because the emulator's memory is
// sequentially consistent.
#pragma once

#include <cstdint>

namespace emulator {

enum class FenceOrder : uint8_t { kSequential, kAcquireRelease, kAcquire, kRelease };

enum class FenceScope : uint8_t { kCta, kCluster, kGpu, kSystem };

enum class FenceKind : uint8_t {
    kMemory,
    kMbarrierInit,
    kProxyAlias,
    kProxyAsync,           // .async: generic and async accesses to all state spaces
    kProxyAsyncGlobal,     // .async.global
    kProxyAsyncShared,     // .async.shared::cta
    kProxyAsyncCluster,    // .async.shared::cluster
    kProxyAsyncToGeneric,  // .async::generic
    kProxyTensormap,       // .tensormap::generic; an acquire covers the 128 bytes at the address in r[0]
};

// An operation stores a FenceOrder in option[0], a FenceScope in option[1] and a FenceKind in option[2]. For an
// acquiring kProxyTensormap, set_address also uses option[3].
}  // namespace emulator
