// A PTX module as it is written: the parser's result. Nothing here knows what an instruction means.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "types.h"

namespace emulator::ptx {

// In a variable's initial value, the address of another variable or of a function.
struct InitialAddress {
    int64_t offset;  // in the variable, in bytes
    std::string name;
    int64_t addend;
};

struct Variable {
    std::string name;
    Space space;
    Type type;
    int64_t bytes;  // 0: of a size that the launch decides (`.extern .shared name[]`)
    int64_t alignment;
    std::vector<uint8_t> initial = {};
    std::vector<InitialAddress> initial_addresses = {};  // whose bytes in `initial` are 0
};

struct Operand {
    enum class Kind : uint8_t {
        kName,     // a register, a symbol or a label: `name`, plus `value` as an offset for symbols
        kInteger,  // `value`
        kFloat,    // bits of the literal's double in `value`
        kFloat32,  // `0f…`: the 32 bits in `value`
        kFloat64,  // `0d…`: the 64 bits in `value`
        kAddress,  // [elements[0] + value], or of a tensor [elements[0] + value, elements[1]]
        kVector,   // {elements…}
        kList,     // (elements…), of a call
        kPair,     // elements[0]|elements[1]
        kSink,     // _
    };
    Kind kind;
    std::string name;
    int64_t value = 0;
    bool negated = false;  // !name
    std::vector<Operand> elements;
};

struct Instruction {
    std::string opcode;  // with all its modifiers
    std::string guard;   // name of the predicate register; empty: none
    bool guard_negated = false;
    std::vector<Operand> operands;
    int scope = 0;
    int line = 0;  // of the text
    int source_file = 0, source_line = 0;
};

struct RegisterRange {
    Type type;
    int count;  // -1: the one register of that name; else name0 … name(count - 1)
};

// What a call through a pointer says of the function: .callprototype.
struct Prototype {
    std::vector<Variable> results, parameters;
};

// A block in braces. Names declared in it hide those of its parent.
struct Scope {
    int parent = -1;
    std::map<std::string, RegisterRange, std::less<>> registers;
    std::map<std::string, Variable, std::less<>> variables;
    std::map<std::string, int, std::less<>> labels;  // index of the instruction that follows
    std::map<std::string, std::vector<std::string>, std::less<>> branch_targets;  // of brx.idx
    std::map<std::string, std::vector<std::string>, std::less<>> call_targets;    // of calls through pointers
    std::map<std::string, Prototype, std::less<>> prototypes;                     // likewise
};

struct Function {
    std::string name;
    bool is_entry = false;
    std::vector<Variable> parameters, results;
    std::vector<Instruction> body;
    std::vector<Scope> scopes;  // [0]: the function's own
    // 0: not stated
    int required_threads[3] = {0, 0, 0}, most_threads[3] = {0, 0, 0}, required_cluster[3] = {0, 0, 0};
    int most_cluster_ctas = 0;
    int most_registers = 0;  // of a thread; 0: not stated
    int least_ctas = 1;      // that a multiprocessor is to hold
    bool is_explicit_cluster = false;
};

struct Module {
    std::string target;
    std::map<std::string, Variable, std::less<>> variables;
    std::map<std::string, std::unique_ptr<Function>, std::less<>> functions;
    std::map<int, std::string> files;
    std::string text;
    std::vector<size_t> line_starts;  // in the text

    std::string line(int number) const;  // counted from 1
};

// Throws a Fault of kind "syntax" that names the line.
Module parse(std::string text);

}  // namespace emulator::ptx
