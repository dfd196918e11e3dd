// The functions that the driver provides to device code: vprintf, __assertfail, malloc and free.
#pragma once

#include "../decoder.h"

namespace emulator {

bool is_in_device_library(const std::string& name);

// Decodes a call of one of them. `results` and `arguments` may be nullptr.
void decode_device_library(Decoder& d, const std::string& name, const ptx::Operand* results,
                           const ptx::Operand* arguments);

}  // namespace emulator
