// A recursive-descent parser of the PTX that compilers emit. Anything else is a syntax error.
#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "fault.h"
#include "lexer.h"
#include "literal.h"
#include "ptx.h"

namespace emulator::ptx {
namespace {

class Parser {
  public:
    explicit Parser(std::string text) {
        module_.text = std::move(text);
        tokens_ = tokenize(module_.text);
        const std::string& kept = module_.text;
        for (size_t start = 0; start <= kept.size(); start = std::min(kept.find('\n', start), kept.size()) + 1) {
            module_.line_starts.push_back(start);
        }
    }

    Module parse() {
        while (peek().kind != Token::Kind::kEnd) parse_directive();
        return std::move(module_);
    }

  private:
    [[noreturn]] void fail(const std::string& message, int line) {
        Fault fault("syntax", message);
        fault.place.line = line;
        fault.place.text = module_.line(line);
        throw fault;
    }
    [[noreturn]] void unexpected() { fail("unexpected '" + std::string(peek().text) + "'", peek().line); }

    const Token& peek(size_t ahead = 0) const { return tokens_[std::min(at_ + ahead, tokens_.size() - 1)]; }
    const Token& next() { return tokens_[std::min(at_++, tokens_.size() - 1)]; }
    bool accept(std::string_view sign) {
        if (!peek().is(sign)) return false;
        ++at_;
        return true;
    }
    void expect(std::string_view sign) {
        if (!accept(sign))
            fail("expected '" + std::string(sign) + "' before '" + std::string(peek().text) + "'", peek().line);
    }
    std::string word() {
        if (peek().kind != Token::Kind::kWord) unexpected();
        return std::string(next().text);
    }
    int64_t integer() {
        const bool minus = accept("-");
        if (peek().kind != Token::Kind::kNumber) unexpected();
        const int64_t value = static_cast<int64_t>(std::strtoull(std::string(next().text).c_str(), nullptr, 0));
        return minus ? -value : value;
    }
    void skip_line() {
        const int line = peek().line;
        while (peek().line == line && peek().kind != Token::Kind::kEnd) ++at_;
    }
    void skip_braces() {
        expect("{");
        for (int depth = 1; depth > 0;) {
            const Token& token = next();
            if (token.kind == Token::Kind::kEnd) unexpected();
            depth += token.is("{") - token.is("}");
        }
    }

    // Skips `.ptr`, the space that it points to and the alignment there. Returns false if there is none.
    bool skip_pointer_clause() {
        if (!accept(".ptr")) return false;
        if (peek().is(".global") || peek().is(".shared") || peek().is(".const") || peek().is(".local")) ++at_;
        if (accept(".align")) integer();
        return true;
    }

    // Parses a directive at module level.
    void parse_directive() {
        if (accept(";")) return;
        if (accept(".version")) return skip_line();
        if (accept(".address_size")) {
            if (integer() != 64) fail("only 64-bit addresses are known", peek().line);
            return;
        }
        if (accept(".target")) {
            module_.target = word();
            return skip_line();
        }
        if (accept(".file")) return parse_file();
        if (accept(".section")) {
            word();
            return skip_braces();
        }
        if (accept(".pragma")) {
            ++at_;
            return expect(";");
        }
        bool is_external = false;
        while (true) {
            if (accept(".extern")) {
                is_external = true;
            } else if (!accept(".visible") && !accept(".weak") && !accept(".common")) {
                break;
            }
        }
        if (accept(".entry")) return parse_function(true);
        if (accept(".func")) return parse_function(false);
        const std::string space = word();
        const auto known = space.front() == '.' ? parse_space(space.substr(1)) : std::nullopt;
        if (!known) fail("unknown directive '" + space + "'", peek().line);
        for (Variable& variable : parse_variables(*known, is_external)) {
            module_.variables.emplace(variable.name, variable);
        }
    }

    void parse_file() {
        const int index = static_cast<int>(integer());
        const std::string_view name = next().text;
        module_.files[index] = std::string(name.substr(1, name.size() - 2));
        while (accept(",")) ++at_;  // time and size
    }

    // Parses what follows the state space of variables: `.align 16 .b8 name[64] = {…}, …;`
    std::vector<Variable> parse_variables(Space space, bool is_external) {
        std::vector<Variable> found;
        int64_t alignment = 0, per_element = 1;
        while (true) {
            if (accept(".align")) {
                alignment = integer();
            } else if (accept(".v2") || accept(".v4")) {
                per_element = tokens_[at_ - 1].text.back() - '0';
            } else if (accept(".attribute")) {
                fail("attributes of variables are not supported", peek().line);
            } else {
                break;
            }
        }
        const Type type = parse_type_word();
        do {
            found.push_back(parse_declarator(space, type, alignment, per_element, is_external));
        } while (accept(","));
        expect(";");
        return found;
    }

    Type parse_type_word() {
        const std::string name = word();
        const auto type = name.front() == '.' ? parse_type(name.substr(1)) : std::nullopt;
        if (!type) fail("unknown type '" + name + "'", peek().line);
        return *type;
    }

    Variable parse_declarator(Space space, Type type, int64_t alignment, int64_t per_element, bool is_external) {
        const int line = peek().line;
        Variable variable{word(), space, type, width_of(type) * per_element, alignment, {}};
        if (variable.alignment == 0) variable.alignment = variable.bytes;
        while (accept("[")) {
            if (accept("]")) {
                if (space != Space::kShared || !is_external) fail("an array without a size", line);
                variable.bytes = 0;
            } else {
                variable.bytes *= integer();
                expect("]");
            }
        }
        if (accept("=")) parse_initial(variable);
        if (is_external && space != Space::kShared) fail("an external variable: modules are not linked", line);
        return variable;
    }

    void parse_initial(Variable& variable) {
        const int width = width_of(variable.type);
        const auto element = [&] {
            const Operand operand = peek().is("generic") ? parse_generic_address() : parse_operand();
            int64_t bits = operand.value;
            if (operand.kind == Operand::Kind::kName) {
                if (width != 8) fail("an address in " + std::to_string(width) + " bytes", peek().line);
                const auto offset = static_cast<int64_t>(variable.initial.size());
                variable.initial_addresses.push_back({offset, operand.name, operand.value});
                bits = 0;
            }
            if (operand.kind == Operand::Kind::kFloat && variable.type == Type::kF32) {
                double wide;
                std::memcpy(&wide, &bits, 8);
                const float value = static_cast<float>(wide);
                std::memcpy(&bits, &value, 4);
            }
            const auto* bytes = reinterpret_cast<const uint8_t*>(&bits);
            variable.initial.insert(variable.initial.end(), bytes, bytes + width);
        };
        if (!peek().is("{")) return element();
        int depth = 0;
        do {  // nested braces only group elements, because every row is complete
            if (accept("{")) {
                ++depth;
            } else if (accept("}")) {
                --depth;
            } else if (!accept(",")) {
                element();
            }
        } while (depth > 0);
    }

    // Parses `generic(name) + offset`. The generic address of a .global or .const variable is its address.
    Operand parse_generic_address() {
        expect("generic");
        expect("(");
        Operand operand{Operand::Kind::kName, word(), 0, false, {}};
        expect(")");
        if (peek().is("+") || peek().is("-")) {
            accept("+");
            operand.value = integer();
        }
        return operand;
    }

    std::vector<Variable> parse_parameters() {
        std::vector<Variable> found;
        if (!accept("(")) return found;
        if (accept(")")) return found;
        do {
            const int line = peek().line;
            if (!accept(".param")) fail("only .param parameters are known", line);
            int64_t alignment = 0;
            while (true) {
                if (accept(".align")) {
                    alignment = integer();
                } else if (!skip_pointer_clause()) {
                    break;
                }
            }
            const Type type = parse_type_word();
            skip_pointer_clause();
            found.push_back(parse_declarator(Space::kParam, type, alignment, 1, false));
        } while (accept(","));
        expect(")");
        return found;
    }

    void parse_function(bool is_entry) {
        auto function = std::make_unique<Function>();
        function->is_entry = is_entry;
        if (!is_entry) function->results = parse_parameters();
        function->name = word();
        function->parameters = parse_parameters();
        while (!peek().is("{") && !peek().is(";")) parse_function_directive(*function);
        if (accept(";")) return;  // a declaration; the body may follow later
        function_ = function.get();
        function_->scopes.emplace_back();
        scope_ = 0;
        source_file_ = source_line_ = 0;
        parse_block();
        module_.functions[function->name] = std::move(function);
    }

    void parse_function_directive(Function& function) {
        int* size = peek().is(".reqntid")             ? function.required_threads
                    : peek().is(".maxntid")           ? function.most_threads
                    : peek().is(".reqnctapercluster") ? function.required_cluster
                                                      : nullptr;
        const std::string name = word();
        if (size != nullptr) {
            int count = 0;
            do size[count++] = static_cast<int>(integer());
            while (count < 3 && accept(","));
            while (count < 3) size[count++] = 1;
        } else if (name == ".maxclusterrank") {
            function.most_cluster_ctas = static_cast<int>(integer());
        } else if (name == ".explicitcluster") {
            function.is_explicit_cluster = true;
        } else if (name == ".maxnreg") {
            function.most_registers = static_cast<int>(integer());
        } else if (name == ".minnctapersm") {
            function.least_ctas = static_cast<int>(integer());
        } else if (name == ".maxnctapersm") {
            integer();  // the older name of .minnctapersm, which ptxas ignores
        } else if (name == ".pragma") {
            ++at_, accept(";");
        } else if (name != ".noreturn") {
            fail("unknown directive '" + name + "'", peek().line);
        }
    }

    void parse_block() {
        expect("{");
        while (!accept("}")) parse_statement();
    }

    void parse_statement() {
        if (accept(";")) return;
        if (peek().is("{")) {
            function_->scopes.emplace_back().parent = scope_;
            const int outer = scope_;
            scope_ = static_cast<int>(function_->scopes.size()) - 1;
            parse_block();
            scope_ = outer;
            return;
        }
        if (accept(".loc")) {
            source_file_ = static_cast<int>(integer());
            source_line_ = static_cast<int>(integer());
            integer();
            if (accept(",")) {  // , function_name label, inlined_at file line column
                while (!accept("inlined_at")) ++at_;
                integer(), integer(), integer();
            }
            return;
        }
        if (accept(".pragma")) {
            ++at_;
            return expect(";");
        }
        if (accept(".reg")) return parse_registers();
        Scope& scope = function_->scopes[scope_];
        if (peek().kind == Token::Kind::kWord && peek().text.front() == '.') {
            const auto space = parse_space(word().substr(1));
            if (!space) fail("unknown directive '" + std::string(tokens_[at_ - 1].text) + "'", tokens_[at_ - 1].line);
            for (Variable& variable : parse_variables(*space, false)) scope.variables.emplace(variable.name, variable);
            return;
        }
        if (peek().kind == Token::Kind::kWord && peek(1).is(":")) {
            const std::string label = word();
            expect(":");
            if (peek().is(".branchtargets") || peek().is(".calltargets")) {
                auto& lists = word() == ".branchtargets" ? scope.branch_targets : scope.call_targets;
                do lists[label].push_back(word());
                while (accept(","));
                return expect(";");
            }
            if (accept(".callprototype")) {
                Prototype& prototype = scope.prototypes[label];
                if (peek().is("(")) prototype.results = parse_parameters();
                word();  // _
                prototype.parameters = parse_parameters();
                accept(".noreturn");
                return expect(";");
            }
            scope.labels[label] = static_cast<int>(function_->body.size());
            return;
        }
        parse_instruction();
    }

    void parse_registers() {
        if (accept(".v2") || accept(".v4")) fail("vector registers are not supported", peek().line);
        const Type type = parse_type_word();
        do {
            const std::string name = word();
            int count = -1;
            if (accept("<")) {
                count = static_cast<int>(integer());
                expect(">");
            }
            function_->scopes[scope_].registers[name] = {type, count};
        } while (accept(","));
        expect(";");
    }

    void parse_instruction() {
        Instruction instruction;
        instruction.line = peek().line;
        if (accept("@")) {
            instruction.guard_negated = accept("!");
            instruction.guard = word();
        }
        instruction.opcode = word();
        instruction.scope = scope_;
        instruction.source_file = source_file_;
        instruction.source_line = source_line_;
        if (!accept(";")) {
            do instruction.operands.push_back(parse_operand());
            while (accept(","));
            expect(";");
        }
        function_->body.push_back(std::move(instruction));
    }

    Operand parse_operand() {
        Operand first = parse_simple_operand();
        if (!accept("|")) return first;
        Operand pair{Operand::Kind::kPair, "", 0, false, {}};
        pair.elements.push_back(std::move(first));
        pair.elements.push_back(parse_simple_operand());
        return pair;
    }

    Operand parse_sequence(Operand::Kind kind, std::string_view end) {
        Operand sequence{kind, "", 0, false, {}};
        if (accept(end)) return sequence;
        do sequence.elements.push_back(parse_operand());
        while (accept(","));
        expect(end);
        return sequence;
    }

    Operand parse_simple_operand() {
        if (accept("{")) return parse_sequence(Operand::Kind::kVector, "}");
        if (accept("(")) return parse_sequence(Operand::Kind::kList, ")");
        if (accept("[")) {
            Operand address{Operand::Kind::kAddress, "", 0, false, {}};
            address.elements.push_back(parse_simple_operand());
            std::swap(address.value, address.elements[0].value);  // the offset
            if (address.elements[0].kind != Operand::Kind::kName) {
                std::swap(address.value, address.elements[0].value);  // an absolute address
            }
            if (accept(",")) address.elements.push_back(parse_simple_operand());
            expect("]");
            return address;
        }
        if (accept("!")) {
            Operand operand = parse_simple_operand();
            operand.negated = true;
            return operand;
        }
        if (peek().kind == Token::Kind::kWord) {
            Operand operand{Operand::Kind::kName, word(), 0, false, {}};
            if (operand.name == "_") operand.kind = Operand::Kind::kSink;
            if (peek().is("+") || peek().is("-")) {
                accept("+");
                operand.value = integer();
            }
            return operand;
        }
        return parse_number();
    }

    Operand parse_number() {
        const bool minus = accept("-");
        if (peek().kind != Token::Kind::kNumber) unexpected();
        return parse_literal(std::string(next().text), minus);
    }

    std::vector<Token> tokens_;
    size_t at_ = 0;
    Module module_;
    Function* function_ = nullptr;
    int scope_ = 0;
    int source_file_ = 0, source_line_ = 0;
};

}  // namespace

std::string Module::line(int number) const {
    const size_t start = line_starts[number - 1];
    return text.substr(start, text.find('\n', start) - start);
}

int Module::architecture() const {
    return std::atoi(target.c_str() + std::min(target.size(), std::strlen("sm_")));
}

Module parse(std::string text) {
    return Parser(std::move(text)).parse();
}

}  // namespace emulator::ptx
