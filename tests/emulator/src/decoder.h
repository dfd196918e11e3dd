// Turns a parsed instruction into an operation: the interface that the instruction families use.
#pragma once

#include <cstring>
#include <initializer_list>
#include <map>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "fault.h"
#include "linker.h"
#include "program.h"

namespace emulator {

struct Address {
    Slot base;
    int base_width;
    int64_t offset;
};

// Decodes one function, one instruction after the other.
class Decoder {
  public:
    struct Register {
        Type type;
        Slot slot;
    };
    using Registers = std::vector<std::unordered_map<std::string, Register>>;  // by scope, then by name

    // Registers that `registers` does not contain get slots of their own.
    Decoder(Program& program, FunctionCode& code, const VariableAddresses& variables, Registers registers = {});
    void begin(const ptx::Instruction& instruction, Operation& operation);
    void finish();  // fails if the family has not accepted every modifier

    // Modifiers, without their dots. The family may ask for them in any order.
    std::string_view root() const { return words_.front(); }
    bool accept(std::string_view modifier);
    // Accepts one of these modifiers and returns its index in the list, -1 if the opcode has none of them.
    int accept_any(std::initializer_list<std::string_view> modifiers);
    int accept_first(std::initializer_list<std::string_view> modifiers);  // the same, for the first one in the opcode
    int require_any(std::initializer_list<std::string_view> modifiers);
    std::optional<Type> accept_type();  // the first type that has not been accepted yet
    Type require_type();
    Type require_type(std::initializer_list<Type> known);
    Space accept_space();  // kGeneric if none is named
    [[noreturn]] void fail(const std::string& reason) const;

    // Operands.
    size_t num_operands() const { return instruction_->operands.size(); }
    void require_operands(size_t least, size_t most);
    const ptx::Operand& operand(size_t i) const;
    Slot read(const ptx::Operand& operand, Type type);
    Slot read(size_t i, Type type) { return read(operand(i), type); }
    // Returns a register, which may be wider than the type, and its width. Constants have the type's width.
    std::pair<Slot, int> read_any(const ptx::Operand& operand, Type type);
    Slot read_predicate(const ptx::Operand& operand, bool& is_negated);
    bool is_predicate(const ptx::Operand& operand);  // a register of that kind
    Slot write(const ptx::Operand& operand, Type type);
    Slot write(size_t i, Type type) { return write(operand(i), type); }
    std::pair<Slot, int> write_any(const ptx::Operand& operand, Type type);
    Slot write_predicate(const ptx::Operand& operand);
    int64_t immediate(size_t i) const;
    // Changes `space` from kParam to kLocal for parameters that lie in a frame. `parts` is 2 for a tensor's address,
    // whose second part is the coordinates.
    Address address(size_t i, Space& space, size_t parts = 1);
    // Returns the elements of a vector operand, or the operand itself.
    std::vector<const ptx::Operand*> elements(size_t i) const;
    int target(const ptx::Operand& label) const;
    const std::vector<std::string>& branch_targets(const ptx::Operand& label) const;
    const std::vector<std::string>* call_targets(const ptx::Operand& label) const;  // nullptr: not a .calltargets list
    const ptx::Prototype* prototype(const ptx::Operand& label) const;               // nullptr: not a .callprototype
    std::optional<uint64_t> function_address(const std::string& name) const;
    int label(const std::string& name) const;
    int64_t local_offset(const ptx::Operand& parameter) const;  // for a .param variable of the function's body

    Slot constant(uint64_t bits, int width);
    Slot scratch(int width);  // for results that are discarded
    Slot carry();             // the condition code's carry flag, a predicate
    // Fails unless the module's target is sm_<version> or later.
    void require_target(int version) const;
    void lay_out_locals();

    // The registers that an instruction reads and writes; one entry for each `begin` so far.
    struct Accesses {
        std::vector<Slot> reads, writes;              // registers of 4 bytes, which wgmma may use
        std::vector<Slot> other_reads, other_writes;  // all others, predicates included
    };
    const std::vector<Accesses>& accesses() const { return accesses_; }
    const Registers& registers() const { return registers_; }

    Operation& operation() { return *operation_; }
    Program& program() { return program_; }
    const FunctionCode& code() const { return code_; }

  private:
    const Register* find_register(const std::string& name);
    template <typename Member>
    auto* declared(Member ptx::Scope::* member, const std::string& name) const;
    const ptx::Variable* find_variable(const std::string& name, int* scope) const;
    std::optional<Slot> special(const std::string& name, int width);
    Slot special_slot(Special special, int index, int width);
    std::optional<Slot> symbol(const std::string& name, int64_t offset, int width);
    Slot allocate(int bytes);
    void note_read(const Register& reg);
    uint64_t literal_bits(const ptx::Operand& operand, Type type) const;

    Program& program_;
    FunctionCode& code_;
    const VariableAddresses& variables_;
    const ptx::Instruction* instruction_ = nullptr;
    Operation* operation_ = nullptr;
    std::vector<std::string_view> words_;  // [0]: the opcode's root; then its modifiers
    std::vector<bool> used_;
    Registers registers_;
    std::map<std::pair<uint64_t, int>, Slot> constants_;
    std::map<std::pair<int, std::string>, int64_t> locals_;  // (scope, name) to offset
    std::map<int, Slot> scratches_;                          // by width
    std::map<bool, Slot> predicate_constants_;
    std::optional<Slot> carry_;
    std::vector<Accesses> accesses_;
};

// A family is a pair of functions and its rows in families/table.cpp.
//
// decode(Decoder&) runs once for each instruction of a kernel. It accepts every modifier that it understands; a
// modifier that it has not accepted is a fault of kind "unsupported". It fills `operation()`: the registers (written
// ones first), the family's own `option` and `value`, the class for the reports, and `execute`. It gets each register
// by a call of read or write, from which register_allocation.cpp learns where the register is alive.
//
// execute(warp, operation, mask) runs for the lanes in the mask, and leaves the registers of other lanes unchanged. A
// register may be both an operand and a result, as in `add.s32 %r1, %r1, %r1`. It accesses memory through Warp's
// functions, which check bounds and races. It throws a Fault for a mistake of the kernel.
struct Family {
    std::string_view root;
    void (*decode)(Decoder&);
};

// Returns the family of an opcode's root, nullptr if there is none.
const Family* find_family(std::string_view root);

// The layout of shared variables. kLeastAligned puts each at an odd multiple of its declared alignment, which reveals a
// kernel that needs more. kFromBase puts one after the other, as ptxas does.
enum class SharedLayout : uint8_t { kLeastAligned, kFromBase };

// Decodes a kernel and all functions that it calls. The module must outlive the program.
std::unique_ptr<Program> decode_kernel(const ptx::Module& module, const std::string& name,
                                       const VariableAddresses& variables, SharedLayout layout);

// Sets `tracked` of the operations that access registers of wgmma. `accesses` has one entry for each operation.
void track_wgmma_registers(Program& program, FunctionCode& code, const std::vector<Decoder::Accesses>& accesses);

// Gives registers that are not alive at the same time the same slot, because every warp has a frame, and of a kernel's
// tens of thousands of registers a few hundred are alive at a time. `decoded` and `decoder` come from a first pass with
// a slot for each register. `code` is for the second pass: its image grows by the slots.
Decoder::Registers allocate_registers(const Program& program, const FunctionCode& decoded, const Decoder& decoder,
                                      FunctionCode& code);

// Sets `join` of each operation of the function to its immediate post-dominator.
void find_joins(Program& program, const FunctionCode& code);

}  // namespace emulator
