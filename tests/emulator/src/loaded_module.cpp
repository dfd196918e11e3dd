#include "loaded_module.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "linker.h"

namespace emulator {

LoadedModule::LoadedModule(std::string text, SharedLayout layout)
    : module_(ptx::parse(std::move(text))), layout_(layout) {
    for (const auto& [name, variable] : module_.variables) {
        if (variable.space != Space::kGlobal && variable.space != Space::kConst) continue;
        std::vector<std::byte>& bytes = storage_.emplace_back(variable.bytes + variable.alignment);
        const auto start = reinterpret_cast<uint64_t>(bytes.data());
        const uint64_t alignment = variable.alignment;
        const uint64_t address = (start + alignment - 1) / alignment * alignment;
        if (!variable.initial.empty()) {
            std::memcpy(reinterpret_cast<void*>(address), variable.initial.data(), variable.initial.size());
        }
        variables_[name] = address;
        allocations_.push_back({address, address + variable.bytes, "the variable " + name});
    }
    link(module_, variables_);
}

std::vector<std::string> LoadedModule::kernels() const {
    std::vector<std::string> names;
    for (const auto& [name, function] : module_.functions) {
        if (function->is_entry) names.push_back(name);
    }
    return names;
}

const Program& LoadedModule::program(const std::string& kernel) {
    const std::lock_guard lock(mutex_);
    auto& program = programs_[kernel];
    if (program == nullptr) {
        program = decode_kernel(module_, kernel, variables_, layout_);
        // Frees the kernel's operands, which take gigabytes in a process that runs every kernel of a library. No other
        // program needs them, because nobody calls a kernel.
        for (ptx::Instruction& instruction : module_.functions.find(kernel)->second->body) {
            instruction.operands.clear();
            instruction.operands.shrink_to_fit();
        }
    }
    return *program;
}

uint64_t LoadedModule::variable(const std::string& name) const {
    const auto found = variables_.find(name);
    return found == variables_.end() ? 0 : found->second;
}

namespace {

void check_block(const Program& program, const uint32_t (&block)[3]) {
    const ptx::Function& kernel = *program.functions[0]->source;
    const uint64_t threads = uint64_t{block[0]} * block[1] * block[2];
    if (threads == 0 || threads > 1024) throw Fault("arguments", "a CTA has 1 to 1024 threads");
    uint64_t most = 1;
    for (int i = 0; i < 3; ++i) {
        if (kernel.required_threads[0] != 0 && static_cast<uint32_t>(kernel.required_threads[i]) != block[i]) {
            throw Fault("arguments", "the kernel's .reqntid is another block size");
        }
        most *= kernel.most_threads[i];
    }
    if (most != 0 && threads > most) throw Fault("arguments", "more threads than the kernel's .maxntid");
}

// Sets the cluster size that the launch states, or else the one that the kernel requires, and checks it.
void set_cluster(const Program& program, Launch& launch) {
    const ptx::Function& kernel = *program.functions[0]->source;
    uint32_t (&cluster)[3] = launch.cluster;
    const bool is_required = kernel.required_cluster[0] != 0;
    if (cluster[0] == 0) {
        for (int i = 0; i < 3; ++i) cluster[i] = is_required ? kernel.required_cluster[i] : 1;
    }
    uint64_t num_ctas = 1;
    for (int i = 0; i < 3; ++i) {
        if (is_required && static_cast<uint32_t>(kernel.required_cluster[i]) != cluster[i]) {
            throw Fault("arguments", "the kernel's .reqnctapercluster is another cluster size");
        }
        if (cluster[i] == 0 || launch.grid[i] % cluster[i] != 0) {
            throw Fault("arguments", "the grid is no multiple of the cluster");
        }
        num_ctas *= cluster[i];
    }
    if (num_ctas > 1 && program.module->architecture() < 90) {
        throw Fault("arguments", program.module->target + " has no clusters");
    }
    const uint64_t most = kernel.most_cluster_ctas != 0 ? kernel.most_cluster_ctas : 16;
    if (num_ctas > most) throw Fault("arguments", "a cluster of more than " + std::to_string(most) + " CTAs");
}

}  // namespace

int64_t most_shared_bytes(std::string_view target) {
    return target == "sm_80" || target == "sm_87"                         ? 163 << 10
           : target == "sm_86" || target == "sm_89" || target == "sm_120" ? 99 << 10
                                                                          : 227 << 10;
}

uint32_t ctas_per_sm(int64_t most_shared_bytes, uint32_t threads, int64_t shared_bytes) {
    constexpr uint32_t kMostThreads = 2048, kMostCtas = 32;
    const int64_t by_shared = (most_shared_bytes + kReservedSharedBytes) / (shared_bytes + kReservedSharedBytes);
    return std::min({kMostCtas, kMostThreads / threads, static_cast<uint32_t>(by_shared)});
}

Allocation allocation_of(const uint64_t& workspace) {
    const auto address = reinterpret_cast<uint64_t>(&workspace);
    return {address, address + sizeof(workspace), "the workspace of the grid's barrier"};
}

void check_launch(int64_t most_shared_bytes, Launch& launch) {
    const Program& program = *launch.program;
    check_block(program, launch.block);
    set_cluster(program, launch);
    const int64_t total = program.static_shared_bytes + launch.shared_bytes;
    if (launch.shared_bytes < 0 || total > most_shared_bytes) {
        throw Fault("arguments", std::to_string(total) + " bytes of shared memory; a CTA has at most " +
                                     std::to_string(most_shared_bytes));
    }
    const uint32_t threads = launch.block[0] * launch.block[1] * launch.block[2];
    launch.num_resident = launch.num_sms * ctas_per_sm(most_shared_bytes, threads, total);
    const uint64_t num_ctas = uint64_t{launch.grid[0]} * launch.grid[1] * launch.grid[2];
    if (launch.grid_workspace != 0 && num_ctas > launch.num_resident) {
        throw Fault("arguments", "a cooperative launch of " + std::to_string(num_ctas) + " CTAs; " +
                                     std::to_string(launch.num_resident) + " can run at a time");
    }
}

}  // namespace emulator
