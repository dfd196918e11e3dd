// Parses PTX's literals.
#pragma once

#include <string>

#include "ptx.h"

namespace emulator::ptx {

// `text`: 12, 0x1f, 0b101, 1.5e3, 0f3F800000 or 0d3FF0000000000000. `is_negative`: a minus precedes it.
Operand parse_literal(const std::string& text, bool is_negative);

}  // namespace emulator::ptx
