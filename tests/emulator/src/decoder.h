// From a parsed instruction to an operation: what the instruction families use to take one apart.
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

// One for each function that is decoded; it stands on one instruction at a time.
class Decoder {
  public:
    struct Register {
        Type type;
        Slot slot;
    };
    using Registers = std::vector<std::unordered_map<std::string, Register>>;  // by the scope that declares them

    // Each register gets a slot of its own, but for those that `registers` has already.
    Decoder(Program& program, FunctionCode& code, const VariableAddresses& variables, Registers registers = {});
    void begin(const ptx::Instruction& instruction, Operation& operation);
    void finish();  // fails if a modifier was not understood

    // Modifiers, without their dots, in whatever order the family asks for them.
    std::string_view root() const { return words_.front(); }
    bool accept(std::string_view modifier);
    // Index of the one of these that is there, -1 if none is.
    int accept_any(std::initializer_list<std::string_view> modifiers);
    int accept_first(std::initializer_list<std::string_view> modifiers);  // likewise, the first of them in the opcode
    int require_any(std::initializer_list<std::string_view> modifiers);
    std::optional<Type> accept_type();  // the first that is left
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
    // A register that may be wider than the type; constants have the type's width.
    std::pair<Slot, int> read_any(const ptx::Operand& operand, Type type);
    Slot read_predicate(const ptx::Operand& operand, bool& is_negated);
    bool is_predicate(const ptx::Operand& operand);  // a register of that kind
    Slot write(const ptx::Operand& operand, Type type);
    Slot write(size_t i, Type type) { return write(operand(i), type); }
    std::pair<Slot, int> write_any(const ptx::Operand& operand, Type type);
    Slot write_predicate(const ptx::Operand& operand);
    int64_t immediate(size_t i) const;
    // In an address of parameters, `space` becomes local where these lie in a frame.
    // A tensor's address has a second part, its coordinates.
    Address address(size_t i, Space& space, size_t parts = 1);
    // The operands of a vector, or the one.
    std::vector<const ptx::Operand*> elements(size_t i) const;
    int target(const ptx::Operand& label) const;
    const std::vector<std::string>& branch_targets(const ptx::Operand& label) const;
    const std::vector<std::string>* call_targets(const ptx::Operand& label) const;  // nullptr: it is no such list
    const ptx::Prototype* prototype(const ptx::Operand& label) const;               // likewise
    std::optional<uint64_t> function_address(const std::string& name) const;
    int label(const std::string& name) const;
    int64_t local_offset(const ptx::Operand& parameter) const;  // of a .param variable of this function's body

    Slot constant(uint64_t bits, int width);
    Slot scratch(int width);  // for results that nobody reads
    Slot carry();             // the condition code's carry flag, a predicate
    // Fails unless the module's target is sm_<version> or later.
    void require_target(int version) const;
    void lay_out_locals();

    // Registers that each instruction so far reads and writes, one entry for each `begin`.
    struct Accesses {
        std::vector<Slot> reads, writes;              // of 4 bytes, which wgmma may use
        std::vector<Slot> other_reads, other_writes;  // predicates, too
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
    std::vector<std::string_view> words_;  // [0] the opcode's root
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
// decode(Decoder&) runs once for each instruction of a kernel. It asks for every modifier that it understands; one that
// it has not asked for is a fault of kind "unsupported". It fills `operation()`: the registers, those that are written
// first, each by a call of read or write, from which register_allocation.cpp learns what is alive where; what it has
// found out in `option` and `value`; the class that reports count it by; and `execute`.
//
// execute(warp, operation, mask) runs for the lanes in the mask alone: it leaves the registers of the others as they
// are. A register may be both an operand and a result, as in `add.s32 %r1, %r1, %r1`. Memory is reached through Warp's
// functions, which check bounds and races; a mistake of the kernel is a `Fault`.
struct Family {
    std::string_view root;
    void (*decode)(Decoder&);
};

// All opcodes; nullptr if there is none of that name.
const Family* find_family(std::string_view root);

// Says where shared variables lie. Least aligned: each at an odd multiple of the alignment that it declares, so that a
// kernel which needs more is found out. From the base: one after the other, as ptxas does it.
enum class SharedLayout : uint8_t { kLeastAligned, kFromBase };

// Decodes a kernel and all that it calls. The module must outlive the program.
std::unique_ptr<Program> decode_kernel(const ptx::Module& module, const std::string& name,
                                       const VariableAddresses& variables, SharedLayout layout);

// Sets `tracked` of the operations that access registers which wgmma uses; `accesses`: of each operation.
void track_wgmma_registers(Program& program, FunctionCode& code, const std::vector<Decoder::Accesses>& accesses);

// Gives registers that are not alive at the same time the same slot: kernels have tens of thousands of names for values
// of which few hundred are alive at a time, and every warp has a frame. `decoded` has seen all of the function, each of
// whose registers has a slot of its own there; `code` is the one to be decoded next, and gets room for the slots.
Decoder::Registers allocate_registers(const Program& program, const FunctionCode& decoded, const Decoder& decoder,
                                      FunctionCode& code);

// Sets `join` of each branch of the function to the immediate post-dominator.
void find_joins(Program& program, const FunctionCode& code);

}  // namespace emulator
