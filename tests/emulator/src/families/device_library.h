// Functions that device code calls and the driver provides.
#pragma once

#include "../decoder.h"

namespace emulator {

bool is_in_device_library(const std::string& name);

// A call of one; the lists may be nullptr.
void decode_device_library(Decoder& d, const std::string& name, const ptx::Operand* results,
                           const ptx::Operand* arguments);

}  // namespace emulator
