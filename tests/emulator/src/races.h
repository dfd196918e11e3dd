// Messages for the races that the race detector finds.
#pragma once

#include "machine.h"

namespace emulator {

// Returns the error of kind "race", "proxy" (a fence between the proxies is missing) or "cluster" (beyond a CTA's end).
Fault fault_of(const Launch& launch, const Conflict& conflict);

}  // namespace emulator
