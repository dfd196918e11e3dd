// The syntax tree of a PTX module, which the parser builds. Nothing here knows what an instruction means.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "types.h"

namespace emulator::ptx {

// The address of a variable or of a function as part of another variable's initial value.
struct InitialAddress {
    int64_t offset;  // in the initialised variable, in bytes
    std::string name;
    int64_t addend;
};

struct Variable {
    std::string name;
    Space space;
    Type type;
    int64_t bytes;  // 0: the launch decides (`.extern .shared name[]`)
    int64_t alignment;
    std::vector<uint8_t> initial = {};
    std::vector<InitialAddress> initial_addresses = {};  // their bytes in `initial` are 0
};

struct Operand {
    enum class Kind : uint8_t {
        kName,     // a register, a symbol or a label: `name`, plus `value` as an offset for symbols
        kInteger,  // `value`
        kFloat,    // a decimal literal: the bits of its double in `value`
        kFloat32,  // `0f…`: the 32 bits in `value`
        kFloat64,  // `0d…`: the 64 bits in `value`
        kAddress,  // [elements[0] + value], or for a tensor [elements[0] + value, elements[1]]
        kVector,   // {elements…}
        kList,     // (elements…), in a call
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
    int line = 0;  // line number in the PTX text
    int source_file = 0, source_line = 0;
};

struct RegisterRange {
    Type type;
    int count;  // -1: the one register of that name; else name0 … name(count - 1)
};

// The signature that a call through a pointer states: .callprototype.
struct Prototype {
    std::vector<Variable> results, parameters;
};

// A block in braces. Names declared in it hide those of its parent.
struct Scope {
    int parent = -1;
    std::map<std::string, RegisterRange, std::less<>> registers;
    std::map<std::string, Variable, std::less<>> variables;
    std::map<std::string, int, std::less<>> labels;  // index of the instruction that follows
    std::map<std::string, std::vector<std::string>, std::less<>> branch_targets;  // for brx.idx
    std::map<std::string, std::vector<std::string>, std::less<>> call_targets;    // for calls through pointers
    std::map<std::string, Prototype, std::less<>> prototypes;                     // for calls through pointers
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
    int most_registers = 0;  // .maxnreg: of a thread; 0: not stated
    int least_ctas = 1;      // .minnctapersm
    bool is_explicit_cluster = false;
};

struct Module {
    std::string target;
    std::map<std::string, Variable, std::less<>> variables;
    std::map<std::string, std::unique_ptr<Function>, std::less<>> functions;
    std::map<int, std::string> files;
    std::string text;
    std::vector<size_t> line_starts;  // offsets in `text`

    std::string line(int number) const;  // `number` counts from 1
    int architecture() const;            // 90 for a target "sm_90a"
};

// Throws a Fault of kind "syntax" that names the line.
Module parse(std::string text);

}  // namespace emulator::ptx
