#include "launching.h"

#include <cstring>

#include "allocations.h"
#include "errors.h"

namespace emulator::runtime {
namespace {

std::mutex mutex;
Options current_options;
int current_runs = 1;
std::function<void(const Launched&)> current_listener;

GlobalMemory memory_of(const LoadedModule& module, const uint64_t& workspace, bool tracked) {
    std::vector<Allocation> allocations = module.allocations();
    allocations.push_back(allocation_of(workspace));
    if (tracked) {
        const std::vector<Allocation> live = TrackedAllocations::instance().snapshot();
        allocations.insert(allocations.end(), live.begin(), live.end());
    } else {
        // No host maps anything beyond these, so that null pointers are found out.
        constexpr uint64_t kLeast = uint64_t{1} << 16, kMost = uint64_t{1} << 47;
        allocations.push_back({kLeast, kMost, "the host's memory"});
    }
    return GlobalMemory(std::move(allocations));
}

std::vector<std::byte> packed(const Program& program, void** arguments) {
    std::vector<std::byte> bytes(program.parameter_bytes);
    for (size_t i = 0; i < program.parameters.size(); ++i) {
        const Parameter& parameter = program.parameters[i];
        std::memcpy(bytes.data() + parameter.offset, arguments[i], parameter.bytes);
    }
    return bytes;
}

bool fits_grid(const dim3& grid) {
    constexpr unsigned kMostX = 0x7fffffff, kMostYAndZ = 65535;
    return grid.x > 0 && grid.y > 0 && grid.z > 0 && grid.x <= kMostX && grid.y <= kMostYAndZ && grid.z <= kMostYAndZ;
}

bool fits_block(const dim3& block) {
    constexpr uint64_t kMostThreads = 1024;
    const uint64_t threads = uint64_t{block.x} * block.y * block.z;
    return threads > 0 && threads <= kMostThreads && block.z <= 64;
}

// What CUDA refuses with an error of its own; the emulator's check_launch looks at the rest.
cudaError_t check(const Kernel& kernel, const Program& program, const Request& request) {
    if (!fits_grid(request.grid) || !fits_block(request.block)) return fail(cudaErrorInvalidConfiguration);
    const int64_t most = most_dynamic_bytes(kernel, program), shared_bytes = request.shared_bytes;
    if (shared_bytes > most) {
        return fail(cudaErrorInvalidValue,
                    "invalid argument: " + std::to_string(shared_bytes) +
                        " bytes of dynamic shared memory, of at most " + std::to_string(most) +
                        (kernel.allowed_dynamic_bytes(device_index()) ? "" : " without cudaFuncSetAttribute"));
    }
    constexpr uint32_t kPortableCtas = 8;
    const auto& cluster = request.cluster;
    const bool is_large = uint64_t{cluster[0]} * cluster[1] * cluster[2] > kPortableCtas;
    if (is_large && !kernel.may_have_large_clusters) {
        return fail(cudaErrorInvalidClusterSize,
                    "a cluster of more than 8 CTAs needs "
                    "cudaFuncAttributeNonPortableClusterSizeAllowed");
    }
    return cudaSuccess;
}

}  // namespace

std::atomic<int64_t> attribute_calls{0};

Options options() {
    const std::lock_guard lock(mutex);
    return current_options;
}

void set_options(const Options& options) {
    const std::lock_guard lock(mutex);
    current_options = options;
}

void set_runs_of_a_launch(int runs) {
    const std::lock_guard lock(mutex);
    current_runs = runs;
}

void set_listener(std::function<void(const Launched&)> listener) {
    const std::lock_guard lock(mutex);
    current_listener = std::move(listener);
}

std::optional<Code> code_of(const Kernel& kernel) {
    const FatBinary::Loaded loaded = kernel.binary->load();
    if (loaded.module == nullptr) return std::nullopt;
    return Code{loaded.module->program(kernel.name), *loaded.text, *loaded.module};
}

int64_t most_dynamic_bytes(const Kernel& kernel, const Program& program) {
    const std::optional<int64_t> allowed = kernel.allowed_dynamic_bytes(device_index());
    if (allowed) return *allowed;
    return std::max<int64_t>(0, kSharedBytesByDefault - program.static_shared_bytes);
}

cudaError_t launch(const Kernel& kernel, const Request& request) try {
    const std::optional<Code> code = code_of(kernel);
    if (!code) return fail(cudaErrorNoKernelImageForDevice);
    const cudaError_t error = check(kernel, code->program, request);
    if (error != cudaSuccess) return error;

    const Options options = runtime::options();
    const Device device = runtime::device();
    uint64_t workspace = 0;
    const GlobalMemory memory = memory_of(code->module, workspace, options.tracked);
    Launch launch{};
    launch.program = &code->program;
    launch.memory = &memory;
    launch.parameters = packed(code->program, request.arguments);
    const auto set = [](uint32_t (&to)[3], const dim3& from) { to[0] = from.x, to[1] = from.y, to[2] = from.z; };
    set(launch.grid, request.grid);
    set(launch.block, request.block);
    std::copy(request.cluster.begin(), request.cluster.end(), launch.cluster);
    launch.shared_bytes = static_cast<int64_t>(request.shared_bytes);
    launch.num_sms = device.num_sms;
    launch.seed = options.seed;
    launch.checks = options.checks;
    launch.races = options.races;
    launch.uninitialised_errors = options.uninitialised;
    launch.unawaited_errors = options.unawaited;
    launch.instruction_limit = options.instruction_limit;
    launch.workers = options.workers;
    if (request.is_cooperative) launch.grid_workspace = reinterpret_cast<uint64_t>(&workspace);
    check_launch(device.most_shared_bytes, launch);
    std::function<void(const Launched&)> listener;
    int runs;
    {
        const std::lock_guard lock(mutex);
        listener = current_listener;
        runs = current_runs;
    }
    for (int run = 0; run < runs; ++run) {
        const Report report = run_launch(launch);
        if (listener) listener({code->program, code->text, launch, report});
    }
    return cudaSuccess;
} catch (const Fault& fault) {
    return fail(fault);
}

}  // namespace emulator::runtime
