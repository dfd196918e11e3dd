// Splits PTX text into tokens.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace emulator::ptx {

struct Token {
    enum class Kind { kWord, kNumber, kString, kSign, kEnd };
    Kind kind;
    std::string_view text;
    int line;
    bool is(std::string_view sign) const { return text == sign && kind != Kind::kString; }
};

// Words include their dots and double colons (`ld.global.L1::evict_last`), but not the colon of a label.
std::vector<Token> tokenize(std::string_view text);

}  // namespace emulator::ptx
