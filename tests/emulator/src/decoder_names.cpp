// Resolves names in the scope of an instruction: special registers, variables, labels, lists of targets and prototypes.
#include "decoder.h"

namespace emulator {

Slot Decoder::special_slot(Special special, int index, int width) {
    for (const SpecialSlot& known : code_.specials) {
        if (known.special == special && known.index == index && known.width == width) return known.slot;
    }
    const Slot slot = allocate(width * kWarpSize);
    code_.specials.push_back({slot, special, index, width});
    return slot;
}

std::optional<Slot> Decoder::special(const std::string& name, int width) {
    constexpr std::pair<std::string_view, Special> kVectors[] = {{"%tid.", Special::kTid},
                                                                 {"%ntid.", Special::kNtid},
                                                                 {"%ctaid.", Special::kCtaid},
                                                                 {"%nctaid.", Special::kNctaid},
                                                                 {"%clusterid.", Special::kClusterid},
                                                                 {"%nclusterid.", Special::kNclusterid},
                                                                 {"%cluster_ctaid.", Special::kClusterCtaid},
                                                                 {"%cluster_nctaid.", Special::kClusterNctaid}};
    for (const auto& [prefix, special] : kVectors) {
        if (name.size() == prefix.size() + 1 && name.compare(0, prefix.size(), prefix) == 0) {
            const int index = name.back() - 'x';
            if (index >= 0 && index < 3) return special_slot(special, index, width);
        }
    }
    constexpr std::pair<std::string_view, Special> kScalars[] = {{"%laneid", Special::kLaneid},
                                                                 {"%warpid", Special::kWarpid},
                                                                 {"%nwarpid", Special::kNwarpid},
                                                                 {"%smid", Special::kSmid},
                                                                 {"%nsmid", Special::kNsmid},
                                                                 {"%gridid", Special::kGridid},
                                                                 {"%cluster_ctarank", Special::kClusterCtarank},
                                                                 {"%cluster_nctarank", Special::kClusterNctarank},
                                                                 {"%dynamic_smem_size", Special::kDynamicShared},
                                                                 {"%total_smem_size", Special::kTotalShared}};
    for (const auto& [known, special] : kScalars) {
        if (name == known) return special_slot(special, 0, width);
    }
    constexpr std::string_view kMasks[] = {"%lanemask_eq", "%lanemask_le", "%lanemask_lt", "%lanemask_ge",
                                           "%lanemask_gt"};
    for (int i = 0; i < 5; ++i) {
        if (name == kMasks[i]) return special_slot(Special::kLanemask, i, width);
    }
    // These two of the driver's 32 %envreg registers hold the address of a cooperative launch's workspace.
    if (name == "%envreg1" || name == "%envreg2") return special_slot(Special::kEnvironment, name.back() - '0', width);
    if (name == "WARP_SZ") return constant(kWarpSize, width);
    return std::nullopt;
}

const ptx::Variable* Decoder::find_variable(const std::string& name, int* found_scope) const {
    for (int scope = instruction_->scope; scope >= 0; scope = code_.source->scopes[scope].parent) {
        const auto& declared = code_.source->scopes[scope].variables;
        const auto found = declared.find(name);
        if (found == declared.end()) continue;
        *found_scope = scope;
        return &found->second;
    }
    return nullptr;
}

std::optional<Slot> Decoder::symbol(const std::string& name, int64_t offset, int width) {
    int scope = 0;
    const ptx::Variable* variable = find_variable(name, &scope);
    if (variable != nullptr && (variable->space == Space::kLocal || variable->space == Space::kParam)) {
        return special_slot(Special::kLocalBase, static_cast<int>(locals_.at({scope, name}) + offset), width);
    }
    const auto shared = program_.shared_offsets.find(name);
    if (shared != program_.shared_offsets.end()) {
        return special_slot(Special::kSharedBase, static_cast<int>(shared->second + offset), width);
    }
    if (code_.source->is_entry) {
        for (const Parameter& parameter : program_.parameters) {
            if (parameter.name == name) return constant(parameter.offset + offset, width);
        }
    }
    const auto formal = code_.formals.find(name);
    if (formal != code_.formals.end()) {
        return special_slot(Special::kLocalBase, static_cast<int>(formal->second + offset), width);
    }
    const auto global = variables_.find(name);
    if (global != variables_.end()) return constant(global->second + offset, width);
    return std::nullopt;
}

// Returns what the innermost scope of the instruction declares under a name, nullptr if no scope declares it.
template <typename Member>
auto* Decoder::declared(Member ptx::Scope::* member, const std::string& name) const {
    const auto* found = static_cast<const typename Member::mapped_type*>(nullptr);
    for (int scope = instruction_->scope; scope >= 0 && found == nullptr; scope = code_.source->scopes[scope].parent) {
        const Member& all = code_.source->scopes[scope].*member;
        const auto place = all.find(name);
        if (place != all.end()) found = &place->second;
    }
    return found;
}

int Decoder::label(const std::string& name) const {
    const int* found = declared(&ptx::Scope::labels, name);
    if (found == nullptr) fail("unknown label " + name);
    return code_.first + *found;
}

int Decoder::target(const ptx::Operand& operand) const {
    if (operand.kind != ptx::Operand::Kind::kName) fail("a label is expected");
    return label(operand.name);
}

const std::vector<std::string>& Decoder::branch_targets(const ptx::Operand& operand) const {
    const auto* found = declared(&ptx::Scope::branch_targets, operand.name);
    if (found == nullptr) fail("unknown list of targets " + operand.name);
    return *found;
}

const std::vector<std::string>* Decoder::call_targets(const ptx::Operand& operand) const {
    return declared(&ptx::Scope::call_targets, operand.name);
}

const ptx::Prototype* Decoder::prototype(const ptx::Operand& operand) const {
    return declared(&ptx::Scope::prototypes, operand.name);
}

std::optional<uint64_t> Decoder::function_address(const std::string& name) const {
    const auto found = variables_.find(name);
    if (found == variables_.end() || found->second < kFunctionWindow) return std::nullopt;
    return found->second;
}

int64_t Decoder::local_offset(const ptx::Operand& parameter) const {
    int scope = 0;
    const ptx::Variable* variable = find_variable(parameter.name, &scope);
    if (variable == nullptr || variable->space != Space::kParam) fail("calls pass .param variables only");
    return locals_.at({scope, parameter.name});
}

}  // namespace emulator
