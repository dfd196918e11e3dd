// What goes wrong, as the Python side sees it: a kind for programs, and words for people with the place in the kernel.
#pragma once

#include <stdexcept>
#include <string>

namespace emulator {

// Where a fault happened; -1 and empty where that is not known, or does not apply.
struct Place {
    std::string kernel;
    int line = -1;       // of the PTX text, from 1
    std::string text;    // of that line
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
    int lane;  // that it happened in, where it is one lane's
    Place place;
};

}  // namespace emulator
