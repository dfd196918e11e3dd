// An error that the emulator reports to Python: a kind for programs to test, a message, and the place in the kernel.
#pragma once

#include <stdexcept>
#include <string>

namespace emulator {

// Where a fault happened. Fields that are unknown or do not apply are -1 or empty.
struct Place {
    std::string kernel;
    int line = -1;       // in the PTX text, from 1
    std::string text;    // that line of the PTX
    std::string source;  // "file:line" of the kernel's source
    int cta[3] = {-1, -1, -1};
    int thread[3] = {-1, -1, -1};
};

// kind: "syntax", "unsupported", "arguments", "out-of-bounds", "misaligned", "uninitialised", "barrier", "mbarrier",
// "cluster", "wgmma", "race" (accesses that nothing orders), "proxy" (no fence between proxies orders them),
// "divergence", "deadlock", "limit", "call", "assert" or "trap".
struct Fault : std::runtime_error {
    Fault(std::string kind, const std::string& message, int lane = -1)
        : std::runtime_error(message), kind(std::move(kind)), lane(lane) {}
    std::string kind;
    int lane;  // the lane that it happened in; -1: no single lane
    Place place;
};

}  // namespace emulator
