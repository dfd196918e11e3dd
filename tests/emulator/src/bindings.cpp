// Python bindings: modules, launches, and faults as exceptions. All bindings are in one translation unit, because the
// templates of pybind11 dominate the time to compile.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <set>

#include "allocations.h"
#include "loaded_module.h"

namespace py = pybind11;

namespace emulator {
namespace {

const char* type_name(Type type) {
    constexpr const char* kNames[] = {"pred",  "b8",     "b16",   "b32",   "b64",  "u8",   "u16",  "u32",    "u64",
                                      "s8",    "s16",    "s32",   "s64",   "f16",  "bf16", "f32",  "f64",    "tf32",
                                      "f16x2", "bf16x2", "u16x2", "s16x2", "b128", "e4m3", "e5m2", "e4m3x2", "e5m2x2"};
    return kNames[static_cast<int>(type)];
}

// Returns a list of (name, type, offset, bytes, is an array) for the kernel's parameters, and their total size.
py::tuple parameters(LoadedModule& module, const std::string& kernel) {
    const Program& program = module.program(kernel);
    py::list list;
    for (const Parameter& p : program.parameters) {
        list.append(py::make_tuple(p.name, type_name(p.type), p.offset, p.bytes, p.is_array));
    }
    return py::make_tuple(list, program.parameter_bytes);
}

// Returns the fields of Python's Report. `shared_bytes` is a CTA's shared memory, static and dynamic.
py::dict report_of(const Program& program, const Report& report, int64_t shared_bytes) {
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
    py::dict warnings;
    for (size_t i = 0; i < report.unawaited.size(); ++i) {
        const py::str text("threads arrived at barrier " + std::to_string(i) + ", which nobody waited for");
        if (report.unawaited[i] > 0) warnings[text] = report.unawaited[i];
    }
    result["warnings"] = warnings;
    result["shared_bytes"] = shared_bytes;
    py::list writes;
    for (const GlobalWrite& write : report.writes) writes.append(py::make_tuple(write.cta, write.line, write.address));
    result["writes"] = writes;
    return result;
}

// Converts the dict that Python's emulator.options.LaunchOptions.resolved() returns.
LaunchOptions options_of(const py::dict& given) {
    LaunchOptions options;
    std::set<std::string> names;
    options.for_each([&](const char* name, auto& field) {
        field = given[name].cast<std::remove_reference_t<decltype(field)>>();
        names.insert(name);
    });
    for (const auto& [name, value] : given) {
        if (names.count(name.cast<std::string>()) == 0) {
            throw py::type_error("the emulator's C++ has no launch option " + name.cast<std::string>());
        }
    }
    return options;
}

py::dict launch_kernel(LoadedModule& module, const std::string& kernel, std::array<uint32_t, 3> grid,
                       std::array<uint32_t, 3> block, const py::bytes& parameter_bytes,
                       const std::vector<std::tuple<uint64_t, uint64_t, std::string>>& memory, int64_t shared_bytes,
                       std::array<uint32_t, 3> cluster, int num_sms, bool replicated_stores, bool cooperative,
                       bool dependent, const py::dict& options) {
    const Program& program = module.program(kernel);
    std::vector<Allocation> allocations = module.allocations();
    uint64_t workspace = 0;
    if (cooperative) allocations.push_back(allocation_of(workspace));
    for (const auto& [begin, bytes, name] : memory) allocations.push_back({begin, begin + bytes, name});
    Launch launch{options_of(options)};
    if (launch.tracked) {
        const std::vector<Allocation> live = TrackedAllocations::instance().snapshot();
        allocations.insert(allocations.end(), live.begin(), live.end());
    }
    const GlobalMemory global(std::move(allocations));
    const std::string_view parameter_view = parameter_bytes;
    launch.program = &program;
    launch.memory = &global;
    launch.parameters.resize(parameter_view.size());
    std::memcpy(launch.parameters.data(), parameter_view.data(), parameter_view.size());
    std::copy(grid.begin(), grid.end(), launch.grid);
    std::copy(block.begin(), block.end(), launch.block);
    std::copy(cluster.begin(), cluster.end(), launch.cluster);
    launch.shared_bytes = shared_bytes;
    launch.replicated_stores = replicated_stores;
    launch.num_sms = num_sms;
    if (cooperative) launch.grid_workspace = reinterpret_cast<uint64_t>(&workspace);
    check_launch(most_shared_bytes(module.source().target), launch);
    static std::shared_ptr<PastAccesses> last;  // of the previous launch: all launches from Python form one stream
    launch.before = dependent ? std::move(last) : nullptr;
    last = nullptr;
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
    last = std::move(report.accesses);
    print();
    return report_of(program, report, program.static_shared_bytes + shared_bytes);
}

}  // namespace
}  // namespace emulator

#include "bindings_allocations.h"
#include "bindings_tensor_map.h"
#ifdef EMULATOR_WITH_CUDA_HEADERS
#include "runtime/bindings.h"
#endif

PYBIND11_MODULE(_emulator, m) {
    using namespace emulator;
    py::class_<LoadedModule>(m, "Module")
        .def(py::init([](const std::string& ptx, bool is_tritons) {
            return std::make_unique<LoadedModule>(ptx,
                                                  is_tritons ? SharedLayout::kFromBase : SharedLayout::kLeastAligned);
        }))
        .def("kernels", &LoadedModule::kernels)
        .def("parameters", &parameters)
        .def("launch", &launch_kernel);
    m.def("take_kernels_that_ran", &take_kernels_that_ran);
    bind_allocations(m);
    bind_tensor_map(m);
#ifdef EMULATOR_WITH_CUDA_HEADERS
    bind_runtime(m);
#endif
    // Python converts these arguments into its EmulatorError.
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
