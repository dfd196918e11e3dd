// Finds the registers of a function that wgmma uses, and the operations that access them.
#include <algorithm>
#include <unordered_map>

#include "decoder.h"

namespace emulator {
namespace {

bool starts_with(const std::string& text, std::string_view prefix) {
    return text.compare(0, prefix.size(), prefix) == 0;
}

bool is_wgmma(const ptx::Instruction& instruction) {
    return starts_with(instruction.opcode, "wgmma.mma_async.");
}

bool is_move(const ptx::Instruction& instruction, const Decoder::Accesses& accesses) {
    const auto is_name = [](const ptx::Operand& operand) { return operand.kind == ptx::Operand::Kind::kName; };
    return starts_with(instruction.opcode, "mov.") && accesses.reads.size() == 1 && accesses.writes.size() == 1 &&
           std::all_of(instruction.operands.begin(), instruction.operands.end(), is_name);
}

}  // namespace

void track_wgmma_registers(Program& program, FunctionCode& code, const std::vector<Decoder::Accesses>& accesses) {
    const std::vector<ptx::Instruction>& body = code.source->body;
    std::unordered_map<Slot, int32_t> ids;
    const auto track = [&](Slot slot) { return ids.emplace(slot, static_cast<int32_t>(ids.size())).second; };
    std::vector<size_t> moves;
    for (size_t i = 0; i < body.size(); ++i) {
        if (is_move(body[i], accesses[i])) moves.push_back(i);
        if (!is_wgmma(body[i])) continue;
        for (const Slot slot : accesses[i].reads) track(slot);
        for (const Slot slot : accesses[i].writes) track(slot);
    }
    if (ids.empty()) return;
    for (bool changed = true; changed;) {  // movs give the same value other names
        changed = false;
        for (const size_t i : moves) {
            const Slot from = accesses[i].reads[0], to = accesses[i].writes[0];
            if (ids.count(from) != 0) changed |= track(to);
            if (ids.count(to) != 0) changed |= track(from);
        }
    }
    const auto tracked = [&](const std::vector<Slot>& slots) {
        std::vector<TrackedRegister> found;
        for (const Slot slot : slots) {
            const auto known = ids.find(slot);
            if (known != ids.end()) found.push_back({slot, known->second});
        }
        return found;
    };
    for (size_t i = 0; i < body.size(); ++i) {
        TrackedAccess access;
        access.reads = tracked(accesses[i].reads);
        access.writes = tracked(accesses[i].writes);
        if (access.reads.empty() && access.writes.empty()) continue;
        access.is_move = is_move(body[i], accesses[i]);
        access.is_wgmma = is_wgmma(body[i]);
        program.operations[code.first + i].tracked = static_cast<int32_t>(program.tracked_accesses.size());
        program.tracked_accesses.push_back(std::move(access));
    }
    code.num_tracked = static_cast<int32_t>(ids.size());
}

}  // namespace emulator
