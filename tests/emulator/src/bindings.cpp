// What Python sees of the emulator: modules, launches, and faults as exceptions.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <mutex>

#include "allocations.h"
#include "bindings.h"
#include "decoder.h"
#include "machine.h"

namespace py = pybind11;

namespace emulator {
namespace {

// A parsed module, the memory of its global and constant variables, and the kernels that have been decoded.
class LoadedModule {
  public:
    explicit LoadedModule(const std::string& text) : module_(ptx::parse(text)) {
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

    std::vector<std::string> kernels() const {
        std::vector<std::string> names;
        for (const auto& [name, function] : module_.functions) {
            if (function->is_entry) names.push_back(name);
        }
        return names;
    }

    const Program& program(const std::string& name) {
        const std::lock_guard lock(mutex_);
        auto& program = programs_[name];
        if (program == nullptr) program = decode_kernel(module_, name, variables_);
        return *program;
    }

    const std::vector<Allocation>& allocations() const { return allocations_; }
    const ptx::Module& source() const { return module_; }

  private:
    ptx::Module module_;
    std::vector<std::vector<std::byte>> storage_;
    VariableAddresses variables_;
    std::vector<Allocation> allocations_;
    std::mutex mutex_;
    std::map<std::string, std::unique_ptr<Program>> programs_;
};

const char* type_name(Type type) {
    constexpr const char* kNames[] = {"pred",  "b8",     "b16",   "b32",   "b64",  "u8",   "u16",  "u32",    "u64",
                                      "s8",    "s16",    "s32",   "s64",   "f16",  "bf16", "f32",  "f64",    "tf32",
                                      "f16x2", "bf16x2", "u16x2", "s16x2", "b128", "e4m3", "e5m2", "e4m3x2", "e5m2x2"};
    return kNames[static_cast<int>(type)];
}

// (name, type, offset, bytes, is an array) of each, and the bytes of all.
py::tuple parameters(LoadedModule& module, const std::string& kernel) {
    const Program& program = module.program(kernel);
    py::list list;
    for (const Parameter& p : program.parameters) {
        list.append(py::make_tuple(p.name, type_name(p.type), p.offset, p.bytes, p.is_array));
    }
    return py::make_tuple(list, program.parameter_bytes);
}

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

constexpr int64_t most_shared_bytes(std::string_view target) {
    return target == "sm_80" || target == "sm_87"                         ? 163 << 10
           : target == "sm_86" || target == "sm_89" || target == "sm_120" ? 99 << 10
                                                                          : 227 << 10;
}

// By threads and shared memory: how many registers a thread has is for ptxas to say.
uint32_t ctas_per_sm(std::string_view target, uint32_t threads, int64_t shared_bytes) {
    constexpr uint32_t kMostThreads = 2048, kMostCtas = 32;
    constexpr int64_t kReserved = 1 << 10;  // of shared memory, for each CTA
    const int64_t by_shared = (most_shared_bytes(target) + kReserved) / (shared_bytes + kReserved);
    return std::min({kMostCtas, kMostThreads / threads, static_cast<uint32_t>(by_shared)});
}

// The cluster that the launch asks for, or else the kernel.
void set_cluster(const Program& program, std::array<uint32_t, 3> cluster, Launch& launch) {
    const ptx::Function& kernel = *program.functions[0]->source;
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
        launch.cluster[i] = cluster[i];
    }
    const std::string& target = program.module->target;
    if (num_ctas > 1 && target < "sm_90") throw Fault("arguments", target + " has no clusters");
    const uint64_t most = kernel.most_cluster_ctas != 0 ? kernel.most_cluster_ctas : 16;
    if (num_ctas > most) throw Fault("arguments", "a cluster of more than " + std::to_string(most) + " CTAs");
}

py::dict report_of(const Program& program, const Report& report) {
    py::list rows;
    for (size_t i = 0; i < program.operations.size(); ++i) {
        const Counts& c = report.operations[i];
        if (c.warps == 0) continue;
        const Operation& operation = program.operations[i];
        const ptx::Instruction& instruction = *operation.instruction;
        const auto file = program.module->files.find(instruction.source_file);
        rows.append(py::make_tuple(kClassNames[static_cast<int>(operation.type)], instruction.opcode, instruction.line,
                                   file == program.module->files.end() ? "" : file->second, instruction.source_line,
                                   c.warps, c.lanes, c.bytes, c.sectors, c.wavefronts, c.conflicts));
    }
    py::dict result;
    result["rows"] = rows;
    py::dict waits;
    for (size_t i = 0; i < report.barrier_waits.size(); ++i) {
        if (report.barrier_waits[i] > 0) waits[py::str("barrier " + std::to_string(i))] = report.barrier_waits[i];
    }
    if (report.cluster_barrier_waits > 0) waits["cluster barrier"] = report.cluster_barrier_waits;
    if (report.mbarrier_waits > 0) waits["mbarrier"] = report.mbarrier_waits;
    result["waits"] = waits;
    return result;
}

py::dict launch(LoadedModule& module, const std::string& kernel, std::array<uint32_t, 3> grid,
                std::array<uint32_t, 3> block, const py::bytes& parameter_bytes,
                const std::vector<std::tuple<uint64_t, uint64_t, std::string>>& memory, bool tracked,
                int64_t shared_bytes, std::array<uint32_t, 3> cluster, int num_sms, uint64_t seed, bool checks,
                bool races, bool replicated_stores, bool uninitialised, int64_t instruction_limit, int workers,
                bool cooperative) {
    const Program& program = module.program(kernel);
    std::vector<Allocation> allocations = module.allocations();
    uint64_t workspace = 0;
    if (cooperative) {
        const auto address = reinterpret_cast<uint64_t>(&workspace);
        allocations.push_back({address, address + sizeof(workspace), "the workspace of the grid's barrier"});
    }
    for (const auto& [begin, bytes, name] : memory) allocations.push_back({begin, begin + bytes, name});
    if (tracked) {
        const std::vector<Allocation> live = TrackedAllocations::instance().snapshot();
        allocations.insert(allocations.end(), live.begin(), live.end());
    }
    const GlobalMemory global(std::move(allocations));
    const std::string_view parameter_view = parameter_bytes;
    Launch launch{};
    launch.program = &program;
    launch.memory = &global;
    launch.parameters.resize(parameter_view.size());
    std::memcpy(launch.parameters.data(), parameter_view.data(), parameter_view.size());
    std::copy(grid.begin(), grid.end(), launch.grid);
    std::copy(block.begin(), block.end(), launch.block);
    launch.shared_bytes = shared_bytes;
    launch.seed = seed;
    launch.checks = checks;
    launch.races = races;
    launch.replicated_stores = replicated_stores;
    launch.uninitialised_errors = uninitialised;
    launch.instruction_limit = instruction_limit;
    launch.workers = workers;
    launch.num_sms = num_sms;
    check_block(program, launch.block);
    set_cluster(program, cluster, launch);
    const int64_t total = program.static_shared_bytes + shared_bytes, most = most_shared_bytes(module.source().target);
    if (shared_bytes < 0 || total > most) {
        throw Fault("arguments", std::to_string(total) + " bytes of shared memory; " + module.source().target +
                                     " has " + std::to_string(most));
    }
    launch.num_resident = num_sms * ctas_per_sm(module.source().target, block[0] * block[1] * block[2], total);
    if (cooperative) {
        const uint64_t num_ctas = uint64_t{grid[0]} * grid[1] * grid[2];
        if (num_ctas > launch.num_resident) {
            throw Fault("arguments", "a cooperative launch of " + std::to_string(num_ctas) + " CTAs; " +
                                         std::to_string(launch.num_resident) + " can run at a time");
        }
        launch.grid_workspace = reinterpret_cast<uint64_t>(&workspace);
    }
    Console console;
    launch.console = &console;
    const auto print = [&] {
        if (!console.text.empty()) py::print(console.text, py::arg("end") = "", py::arg("flush") = true);
    };
    Report report;
    try {
        const py::gil_scoped_release release;
        report = run_launch(launch);
    } catch (const Fault&) {
        print();
        throw;
    }
    print();
    py::dict result = report_of(program, report);
    result["shared_bytes"] = total;
    return result;
}

}  // namespace
}  // namespace emulator

PYBIND11_MODULE(_emulator, m) {
    using namespace emulator;
    py::class_<LoadedModule>(m, "Module")
        .def(py::init<const std::string&>())
        .def("kernels", &LoadedModule::kernels)
        .def("parameters", &parameters)
        .def("launch", &launch);
    bind_allocations(m);
    bind_tensor_map(m);
    // The Python side turns these arguments into its EmulatorError.
    static py::exception<Fault> fault_type(m, "Fault");
    py::register_exception_translator([](std::exception_ptr pointer) {
        try {
            if (pointer) std::rethrow_exception(pointer);
        } catch (const Fault& fault) {
            const Place& p = fault.place;
            const py::tuple arguments = py::make_tuple(fault.kind, fault.what(), p.kernel, p.line, p.text, p.source,
                                                       py::make_tuple(p.cta[0], p.cta[1], p.cta[2]),
                                                       py::make_tuple(p.thread[0], p.thread[1], p.thread[2]));
            PyErr_SetObject(fault_type.ptr(), arguments.ptr());
        }
    });
}
