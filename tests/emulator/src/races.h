// What is said of two accesses that nothing orders.
#pragma once

#include "machine.h"

namespace emulator {

// "race", or "proxy" where they are ordered but a fence between the proxies is missing.
Fault fault_of(const Launch& launch, const Conflict& conflict);

}  // namespace emulator
