#include "literal.h"

#include <cstdlib>
#include <cstring>

namespace emulator::ptx {

Operand parse_literal(const std::string& text, bool is_negative) {
    Operand operand{Operand::Kind::kInteger, "", 0, false, {}};
    const char mark = text.size() > 1 && text[0] == '0' ? text[1] : '\0';
    if (mark == 'f' || mark == 'F' || mark == 'd' || mark == 'D') {
        const bool is_single = mark == 'f' || mark == 'F';
        operand.kind = is_single ? Operand::Kind::kFloat32 : Operand::Kind::kFloat64;
        uint64_t bits = std::strtoull(text.c_str() + 2, nullptr, 16);
        if (is_negative) bits ^= is_single ? uint64_t{1} << 31 : uint64_t{1} << 63;
        operand.value = static_cast<int64_t>(bits);
    } else if (mark != 'x' && mark != 'X' && text.find_first_of(".eE") != std::string::npos) {
        operand.kind = Operand::Kind::kFloat;
        const double value = (is_negative ? -1.0 : 1.0) * std::strtod(text.c_str(), nullptr);
        std::memcpy(&operand.value, &value, 8);
    } else {
        const uint64_t value =
            mark == 'b' ? std::strtoull(text.c_str() + 2, nullptr, 2) : std::strtoull(text.c_str(), nullptr, 0);
        operand.value = static_cast<int64_t>(is_negative ? ~value + 1 : value);
    }
    return operand;
}

}  // namespace emulator::ptx
