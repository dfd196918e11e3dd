#include "lexer.h"

#include <cctype>

#include "fault.h"

namespace emulator::ptx {
namespace {

bool starts_word(char c) {
    return std::isalpha(static_cast<unsigned char>(c)) || c == '_' || c == '$' || c == '%' || c == '.';
}

bool continues_word(char c) {
    return starts_word(c) || std::isdigit(static_cast<unsigned char>(c));
}

}  // namespace

std::vector<Token> tokenize(std::string_view text) {
    std::vector<Token> tokens;
    int line = 1;
    size_t at = 0;
    const auto peek = [&](size_t ahead) { return at + ahead < text.size() ? text[at + ahead] : '\0'; };
    const auto add = [&](Token::Kind kind, size_t length) {
        tokens.push_back({kind, text.substr(at, length), line});
        at += length;
    };
    while (at < text.size()) {
        const char c = text[at];
        if (c == '\n') {
            ++line, ++at;
        } else if (std::isspace(static_cast<unsigned char>(c)) || c == '\0') {
            ++at;
        } else if (c == '/' && peek(1) == '/') {
            while (at < text.size() && text[at] != '\n') ++at;
        } else if (c == '/' && peek(1) == '*') {
            const size_t end = std::min(text.find("*/", at + 2), text.size() - 2);
            for (; at < end + 2; ++at) line += text[at] == '\n';
        } else if (c == '"') {
            const size_t end = text.find('"', at + 1);
            if (end == std::string_view::npos) {
                Fault fault("syntax", "a string that does not end");
                fault.place.line = line;
                throw fault;
            }
            add(Token::Kind::kString, end + 1 - at);
        } else if (std::isdigit(static_cast<unsigned char>(c))) {
            size_t length = 1;
            const bool hexadecimal = c == '0' && (peek(1) == 'x' || peek(1) == 'f' || peek(1) == 'F' ||
                                                  peek(1) == 'd' || peek(1) == 'D' || peek(1) == 'X');
            while (std::isalnum(static_cast<unsigned char>(peek(length))) || peek(length) == '.' ||
                   (!hexadecimal && (peek(length) == '-' || peek(length) == '+') &&
                    std::tolower(peek(length - 1)) == 'e')) {
                ++length;
            }
            add(Token::Kind::kNumber, length);
        } else if (starts_word(c)) {
            size_t length = 1;
            while (true) {
                if (c == '.' && peek(length) == '.') break;  // a directive ends before the next one: `.reg.b16`
                if (continues_word(peek(length))) {
                    ++length;
                } else if (peek(length) == ':' && peek(length + 1) == ':') {
                    length += 2;
                } else {
                    break;
                }
            }
            add(Token::Kind::kWord, length);
        } else {
            add(Token::Kind::kSign, 1);
        }
    }
    tokens.push_back({Token::Kind::kEnd, "", line});
    return tokens;
}

}  // namespace emulator::ptx
