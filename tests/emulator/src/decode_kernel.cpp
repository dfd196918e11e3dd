// Decodes a kernel and the functions that it calls, after laying out parameters and shared memory.
#include <algorithm>
#include <set>

#include "decoder.h"
#include "families/control.h"
#include "memory.h"

namespace emulator {
namespace {

int64_t align(int64_t offset, int64_t alignment) {
    return (offset + alignment - 1) / alignment * alignment;
}

// Returns the kernel, followed by each function that is reachable from it.
std::vector<const ptx::Function*> reachable(const ptx::Module& module, const ptx::Function& kernel) {
    std::vector<const ptx::Function*> found{&kernel};
    for (size_t i = 0; i < found.size(); ++i) {
        for (const ptx::Instruction& instruction : found[i]->body) {
            add_callees(module, *found[i], instruction, found);
        }
    }
    return found;
}

void collect_names(const ptx::Operand& operand, std::set<std::string>& names) {
    if (operand.kind == ptx::Operand::Kind::kName) names.insert(operand.name);
    for (const ptx::Operand& element : operand.elements) collect_names(element, names);
}

// Lays out the static variables that the code names, in the order of falling alignment, and dynamic shared memory after
// them. Addresses begin after the bytes that the system reserves.
void lay_out_shared(Program& program, const std::vector<const ptx::Function*>& functions, SharedLayout layout) {
    std::set<std::string> names;
    std::vector<const ptx::Variable*> variables;
    for (const ptx::Function* function : functions) {
        for (const ptx::Instruction& instruction : function->body) {
            for (const ptx::Operand& operand : instruction.operands) collect_names(operand, names);
        }
        for (const ptx::Scope& scope : function->scopes) {
            for (const auto& [name, variable] : scope.variables) {
                if (variable.space == Space::kShared && names.count(name) != 0) variables.push_back(&variable);
            }
        }
    }
    for (const auto& [name, variable] : program.module->variables) {
        if (variable.space == Space::kShared && names.count(name) != 0) variables.push_back(&variable);
    }
    std::stable_sort(variables.begin(), variables.end(), [](const ptx::Variable* a, const ptx::Variable* b) {
        return (a->bytes == 0) < (b->bytes == 0) || ((a->bytes == 0) == (b->bytes == 0) && a->alignment > b->alignment);
    });
    int64_t bytes = 0, end = kReservedSharedBytes, dynamic_alignment = 1;
    for (const ptx::Variable* variable : variables) {
        if (variable->bytes == 0) dynamic_alignment = std::max(dynamic_alignment, variable->alignment);
    }
    for (const ptx::Variable* variable : variables) {
        const int64_t alignment = variable->bytes == 0 ? dynamic_alignment : variable->alignment;
        bytes = align(bytes, alignment) + variable->bytes;
        end = align(end, alignment);
        if (layout == SharedLayout::kLeastAligned && end / alignment % 2 == 0) end += alignment;
        program.shared_offsets[variable->name] = end;
        end += variable->bytes;
    }
    program.static_shared_bytes = bytes;
    program.dynamic_shared_begin = end;
}

void lay_out_parameters(Program& program, const ptx::Function& kernel) {
    int64_t end = 0;
    for (const ptx::Variable& variable : kernel.parameters) {
        end = align(end, variable.alignment);
        program.parameters.push_back(
            {variable.name, variable.type, end, variable.bytes, variable.bytes != width_of(variable.type)});
        end += variable.bytes;
    }
    program.parameter_bytes = end;
}

void lay_out_formals(FunctionCode& code) {
    for (const auto* list : {&code.source->results, &code.source->parameters}) {
        for (const ptx::Variable& variable : *list) {
            code.local_bytes = align(code.local_bytes, variable.alignment);
            code.formals[variable.name] = code.local_bytes;
            code.local_bytes += variable.bytes;
        }
    }
}

void decode_body(Program& program, FunctionCode& code, Decoder& decoder) {
    decoder.lay_out_locals();
    for (size_t i = 0; i < code.source->body.size(); ++i) {
        const ptx::Instruction& instruction = code.source->body[i];
        Operation& operation = program.operations[code.first + i] = {};
        decoder.begin(instruction, operation);
        const Family* family = find_family(decoder.root());
        if (family == nullptr) decoder.fail("unknown instruction " + std::string(decoder.root()));
        family->decode(decoder);
        decoder.finish();
    }
    track_wgmma_registers(program, code, decoder.accesses());
    program.operations[code.end] = end_of_function(code.source->is_entry);
    program.operations[code.end].instruction = code.source->body.empty() ? nullptr : &code.source->body.back();
}

// Decodes twice: the first pass shows where registers are alive, the second one uses the slots that follow from that.
void decode_function(Program& program, FunctionCode& code, const VariableAddresses& variables) {
    if (!code.source->is_entry) lay_out_formals(code);
    FunctionCode trial = code;
    const size_t num_calls = program.calls.size(), num_indirect = program.indirect_calls.size();
    const size_t num_tables = program.jump_tables.size(), num_tracked = program.tracked_accesses.size();
    Decoder first(program, trial, variables);
    decode_body(program, trial, first);
    Decoder second(program, code, variables, allocate_registers(program, trial, first, code));
    program.calls.resize(num_calls), program.indirect_calls.resize(num_indirect);
    program.jump_tables.resize(num_tables), program.tracked_accesses.resize(num_tracked);
    decode_body(program, code, second);
}

}  // namespace

std::unique_ptr<Program> decode_kernel(const ptx::Module& module, const std::string& name,
                                       const VariableAddresses& variables, SharedLayout layout) {
    const auto kernel = module.functions.find(name);
    if (kernel == module.functions.end() || !kernel->second->is_entry) {
        throw Fault("arguments", "the module has no kernel " + name);
    }
    auto program = std::make_unique<Program>();
    program->name = name;
    program->module = &module;
    const auto functions = reachable(module, *kernel->second);
    lay_out_shared(*program, functions, layout);
    lay_out_parameters(*program, *kernel->second);
    int next = 0;
    for (const ptx::Function* function : functions) {
        auto code = std::make_unique<FunctionCode>();
        code->source = function;
        code->first = next;
        code->end = next + static_cast<int>(function->body.size());
        next = code->end + 1;
        program->functions.push_back(std::move(code));
    }
    program->operations.resize(next);
    for (const auto& code : program->functions) decode_function(*program, *code, variables);
    for (const auto& code : program->functions) find_joins(*program, *code);
    return program;
}

}  // namespace emulator
