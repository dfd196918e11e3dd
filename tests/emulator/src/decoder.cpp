#include "decoder.h"

#include <algorithm>

namespace emulator {

Decoder::Decoder(Program& program, FunctionCode& code, const VariableAddresses& variables, Registers registers)
    : program_(program), code_(code), variables_(variables), registers_(std::move(registers)) {
    registers_.resize(code.source->scopes.size());
}

void Decoder::begin(const ptx::Instruction& instruction, Operation& operation) {
    instruction_ = &instruction;
    operation_ = &operation;
    operation.instruction = &instruction;
    accesses_.emplace_back();
    words_.clear();
    std::string_view rest = instruction.opcode;
    while (true) {
        const size_t dot = rest.find('.');
        words_.push_back(rest.substr(0, dot));
        if (dot == std::string_view::npos) break;
        rest.remove_prefix(dot + 1);
    }
    used_.assign(words_.size(), false);
    used_[0] = true;
    if (!instruction.guard.empty()) {
        const Register* guard = find_register(instruction.guard);
        if (guard == nullptr || guard->type != Type::kPred) fail("the guard is no predicate register");
        operation.is_guarded = true;
        operation.guard_negated = instruction.guard_negated;
        operation.guard = guard->slot;
        note_read(*guard);
    }
}

void Decoder::finish() {
    for (size_t i = 0; i < words_.size(); ++i) {
        if (!used_[i]) fail("unknown modifier ." + std::string(words_[i]));
    }
    if (operation_->execute == nullptr) fail("not executable");
}

void Decoder::fail(const std::string& reason) const {
    Fault fault("unsupported", reason);
    fault.place.kernel = program_.name;
    fault.place.line = instruction_->line;
    fault.place.text = program_.module->line(instruction_->line);
    throw fault;
}

bool Decoder::accept(std::string_view modifier) {
    for (size_t i = 1; i < words_.size(); ++i) {
        if (!used_[i] && words_[i] == modifier) return used_[i] = true;
    }
    return false;
}

int Decoder::accept_any(std::initializer_list<std::string_view> modifiers) {
    int index = 0;
    for (const std::string_view modifier : modifiers) {
        if (accept(modifier)) return index;
        ++index;
    }
    return -1;
}

int Decoder::accept_first(std::initializer_list<std::string_view> modifiers) {
    for (size_t i = 1; i < words_.size(); ++i) {
        const auto found = std::find(modifiers.begin(), modifiers.end(), words_[i]);
        if (used_[i] || found == modifiers.end()) continue;
        used_[i] = true;
        return static_cast<int>(found - modifiers.begin());
    }
    return -1;
}

int Decoder::require_any(std::initializer_list<std::string_view> modifiers) {
    const int found = accept_any(modifiers);
    if (found < 0) fail("a modifier is missing, or unknown");
    return found;
}

std::optional<Type> Decoder::accept_type() {
    for (size_t i = 1; i < words_.size(); ++i) {
        if (used_[i]) continue;
        if (const auto type = parse_type(words_[i])) {
            used_[i] = true;
            return type;
        }
    }
    return std::nullopt;
}

Type Decoder::require_type() {
    const auto type = accept_type();
    if (!type) fail("a type is missing, or unknown");
    return *type;
}

Type Decoder::require_type(std::initializer_list<Type> known) {
    const Type type = require_type();
    if (std::find(known.begin(), known.end(), type) == known.end()) fail("unknown for this type");
    return type;
}

Space Decoder::accept_space() {
    for (size_t i = 1; i < words_.size(); ++i) {
        if (used_[i]) continue;
        if (const auto space = parse_space(words_[i])) {
            used_[i] = true;
            return *space;
        }
    }
    return Space::kGeneric;
}

void Decoder::require_operands(size_t least, size_t most) {
    if (num_operands() < least || num_operands() > most) fail("a form with this number of operands is unknown");
}

const ptx::Operand& Decoder::operand(size_t i) const {
    if (i >= instruction_->operands.size()) fail("an operand is missing");
    return instruction_->operands[i];
}

Slot Decoder::allocate(int bytes) {
    const size_t at = (code_.image.size() + 31) / 32 * 32;
    code_.image.resize(at + bytes, std::byte{0xff});
    return static_cast<Slot>(at);
}

const Decoder::Register* Decoder::find_register(const std::string& name) {
    const size_t digits = name.find_last_not_of("0123456789") + 1;
    for (int scope = instruction_->scope; scope >= 0; scope = code_.source->scopes[scope].parent) {
        const auto known = registers_[scope].find(name);
        if (known != registers_[scope].end()) return &known->second;
        const auto& declared = code_.source->scopes[scope].registers;
        auto range = declared.find(name);
        if (range == declared.end() || range->second.count >= 0) {
            range = declared.end();
            for (size_t split = digits; split < name.size() && range == declared.end(); ++split) {
                const auto prefix = declared.find(name.substr(0, split));  // %r1<9> declares %r10 … %r18
                if (prefix != declared.end() && std::stoi(name.substr(split)) < prefix->second.count) range = prefix;
            }
        }
        if (range == declared.end()) continue;
        const Type type = range->second.type;
        const Slot slot = allocate(type == Type::kPred ? 4 : width_of(type) * kWarpSize);
        return &registers_[scope].emplace(name, Register{type, slot}).first->second;
    }
    return nullptr;
}

void Decoder::note_read(const Register& reg) {
    Accesses& accesses = accesses_.back();
    (width_of(reg.type) == 4 ? accesses.reads : accesses.other_reads).push_back(reg.slot);
}

Slot Decoder::constant(uint64_t bits, int width) {
    if (width < 8) bits &= (uint64_t{1} << (8 * width)) - 1;
    const auto known = constants_.find({bits, width});
    if (known != constants_.end()) return known->second;
    const Slot slot = allocate(width * kWarpSize);
    for (int lane = 0; lane < kWarpSize; ++lane) std::memcpy(code_.image.data() + slot + lane * width, &bits, width);
    return constants_[{bits, width}] = slot;
}

Slot Decoder::scratch(int width) {
    const auto [known, is_new] = scratches_.try_emplace(width, 0);
    if (is_new) known->second = allocate(width == 0 ? 4 : width * kWarpSize);
    return known->second;
}

Slot Decoder::carry() {
    if (!carry_) carry_ = allocate(4);
    return *carry_;
}

void Decoder::require_target(int version) const {
    if (program_.module->architecture() < version) {
        fail("known for sm_" + std::to_string(version) + " and later; the module is for " + program_.module->target);
    }
}

uint64_t Decoder::literal_bits(const ptx::Operand& operand, Type type) const {
    using Kind = ptx::Operand::Kind;
    const bool is_wide = width_of(type) == 8;
    if (operand.kind == Kind::kInteger) {
        if (type == Type::kF32 || type == Type::kF64) {
            if (operand.value != 0) fail("an integer where a floating-point constant is expected");
        }
        return static_cast<uint64_t>(operand.value);
    }
    if (operand.kind == Kind::kFloat32 && width_of(type) == 4) return static_cast<uint64_t>(operand.value);
    if (operand.kind == Kind::kFloat64 && is_wide) return static_cast<uint64_t>(operand.value);
    if (operand.kind == Kind::kFloat || operand.kind == Kind::kFloat64) {
        if (is_wide) return static_cast<uint64_t>(operand.value);
        if (type == Type::kF32) {
            double wide;
            std::memcpy(&wide, &operand.value, 8);
            const float narrow = static_cast<float>(wide);
            uint32_t bits;
            std::memcpy(&bits, &narrow, 4);
            return bits;
        }
    }
    fail("a constant that does not fit the type");
}

Slot Decoder::read(const ptx::Operand& operand, Type type) {
    const auto [slot, width] = read_any(operand, type);
    if (width != width_of(type)) fail("a register of another width than the type");
    return slot;
}

std::pair<Slot, int> Decoder::read_any(const ptx::Operand& operand, Type type) {
    using Kind = ptx::Operand::Kind;
    const int width = width_of(type);
    if (operand.negated) fail("! before what is no predicate");
    switch (operand.kind) {
        case Kind::kInteger:
        case Kind::kFloat:
        case Kind::kFloat32:
        case Kind::kFloat64:
            return {constant(literal_bits(operand, type), width), width};
        case Kind::kName:
            break;
        default:
            fail("an operand of an unknown form");
    }
    if (const Register* known = find_register(operand.name)) {
        if (known->type == Type::kPred) fail("a predicate where a value is expected");
        if (width_of(known->type) < width) fail("a register that is narrower than the type");
        note_read(*known);
        return {known->slot, width_of(known->type)};
    }
    if (const auto slot = special(operand.name, width)) return {*slot, width};
    if (const auto slot = symbol(operand.name, operand.value, width)) return {*slot, width};
    fail("unknown name " + operand.name);
}

Slot Decoder::read_predicate(const ptx::Operand& operand, bool& is_negated) {
    is_negated = operand.negated;
    if (operand.kind == ptx::Operand::Kind::kInteger) {
        const auto [known, is_new] = predicate_constants_.try_emplace(operand.value != 0, 0);
        if (is_new) {
            known->second = allocate(4);
            const uint32_t bits = known->first ? kAllLanes : 0;
            std::memcpy(code_.image.data() + known->second, &bits, 4);
        }
        return known->second;
    }
    const Register* known = operand.kind == ptx::Operand::Kind::kName ? find_register(operand.name) : nullptr;
    if (known == nullptr || known->type != Type::kPred) fail("a predicate is expected");
    note_read(*known);
    return known->slot;
}

bool Decoder::is_predicate(const ptx::Operand& operand) {
    const Register* known = operand.kind == ptx::Operand::Kind::kName ? find_register(operand.name) : nullptr;
    return known != nullptr && known->type == Type::kPred;
}

Slot Decoder::write(const ptx::Operand& operand, Type type) {
    const auto [slot, width] = write_any(operand, type);
    if (width != width_of(type)) fail("a register of another width than the type");
    return slot;
}

std::pair<Slot, int> Decoder::write_any(const ptx::Operand& operand, Type type) {
    if (operand.kind == ptx::Operand::Kind::kSink) return {scratch(width_of(type)), width_of(type)};
    const Register* known = operand.kind == ptx::Operand::Kind::kName ? find_register(operand.name) : nullptr;
    if (known == nullptr || known->type == Type::kPred) fail("a register is expected as destination");
    if (width_of(known->type) < width_of(type)) fail("a register that is narrower than the type");
    Accesses& accesses = accesses_.back();
    (width_of(known->type) == 4 ? accesses.writes : accesses.other_writes).push_back(known->slot);
    return {known->slot, width_of(known->type)};
}

Slot Decoder::write_predicate(const ptx::Operand& operand) {
    if (operand.kind == ptx::Operand::Kind::kSink) return scratch(0);
    const Register* known = operand.kind == ptx::Operand::Kind::kName ? find_register(operand.name) : nullptr;
    if (known == nullptr || known->type != Type::kPred || operand.negated) {
        fail("a predicate register is expected as destination");
    }
    accesses_.back().other_writes.push_back(known->slot);
    return known->slot;
}

int64_t Decoder::immediate(size_t i) const {
    if (operand(i).kind != ptx::Operand::Kind::kInteger) fail("a constant is expected");
    return operand(i).value;
}

Address Decoder::address(size_t i, Space& space, size_t parts) {
    const ptx::Operand& whole = operand(i);
    if (whole.kind != ptx::Operand::Kind::kAddress || whole.elements.size() != parts) fail("an address is expected");
    const ptx::Operand& base = whole.elements[0];
    const bool is_name = base.kind == ptx::Operand::Kind::kName;
    if (is_name) {
        int scope;
        const ptx::Variable* variable = find_variable(base.name, &scope);
        const bool in_frame = (variable != nullptr && variable->space == Space::kParam) || !code_.source->is_entry;
        if (space == Space::kParam && in_frame) space = Space::kLocal;
        if (const Register* known = find_register(base.name)) {
            const int width = width_of(known->type);
            if (width != 4 && width != 8) fail("an address of an unknown width");
            if (width == 4 && (space == Space::kGlobal || space == Space::kGeneric)) fail("a 32-bit global address");
            note_read(*known);
            return {known->slot, width, whole.value};
        }
        if (const auto slot = symbol(base.name, whole.value, 8)) return {*slot, 8, 0};
        fail("unknown name " + base.name);
    }
    if (base.kind != ptx::Operand::Kind::kInteger) fail("an address of an unknown form");
    return {constant(base.value, 8), 8, 0};
}

std::vector<const ptx::Operand*> Decoder::elements(size_t i) const {
    const ptx::Operand& whole = operand(i);
    if (whole.kind != ptx::Operand::Kind::kVector) return {&whole};
    std::vector<const ptx::Operand*> found;
    for (const ptx::Operand& element : whole.elements) found.push_back(&element);
    return found;
}

void Decoder::lay_out_locals() {
    int64_t end = code_.local_bytes;  // after the formal parameters
    for (size_t scope = 0; scope < code_.source->scopes.size(); ++scope) {
        for (const auto& [name, variable] : code_.source->scopes[scope].variables) {
            if (variable.space != Space::kLocal && variable.space != Space::kParam) continue;
            end = (end + variable.alignment - 1) / variable.alignment * variable.alignment;
            locals_[{static_cast<int>(scope), name}] = end;
            end += variable.bytes;
        }
    }
    code_.local_bytes = (end + 15) / 16 * 16;  // frames follow each other
}

}  // namespace emulator
