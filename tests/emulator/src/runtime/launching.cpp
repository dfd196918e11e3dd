#include "launching.h"

#include <cstring>

#include "allocations.h"
#include "errors.h"
#include "streams.h"

namespace emulator::runtime {
namespace {

std::mutex mutex;
LaunchOptions current_options;
int current_runs = 1;
std::function<void(const Launched&)> current_listener;

GlobalMemory memory_of(const LoadedModule& module, const uint64_t& workspace, bool tracked, int device) {
    std::vector<Allocation> allocations = module.allocations();
    allocations.push_back(allocation_of(workspace));
    if (tracked) {
        const std::vector<Allocation> live = TrackedAllocations::instance().snapshot(device);
        allocations.insert(allocations.end(), live.begin(), live.end());
    } else {
        // No process maps memory outside of these limits, so that null pointers are detected.
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

// Checks what CUDA rejects with an error code of its own; check_launch checks the rest.
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

LaunchOptions options() {
    const std::lock_guard lock(mutex);
    return current_options;
}

void set_options(const LaunchOptions& options) {
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
    const std::shared_ptr<LoadedModule> module = kernel.source->load();
    if (module == nullptr) return std::nullopt;
    return Code{module, module->program(kernel.name)};
}

int64_t most_dynamic_bytes(const Kernel& kernel, const Program& program) {
    const std::optional<int64_t> allowed = kernel.allowed_dynamic_bytes(device_index());
    if (allowed) return *allowed;
    return std::max<int64_t>(0, kSharedBytesByDefault - program.static_shared_bytes);
}

cudaError_t apply(const cudaLaunchAttribute* attributes, unsigned num_attributes, Request& request) {
    for (unsigned i = 0; i < num_attributes; ++i) {
        const cudaLaunchAttribute& attribute = attributes[i];
        switch (attribute.id) {
            case cudaLaunchAttributeClusterDimension: {
                const auto& dim = attribute.val.clusterDim;
                if (dim.x == 0 || dim.y == 0 || dim.z == 0) return fail(cudaErrorInvalidClusterSize);
                request.cluster = {dim.x, dim.y, dim.z};
                break;
            }
            case cudaLaunchAttributeCooperative:
                request.is_cooperative = attribute.val.cooperative != 0;
                break;
            case cudaLaunchAttributeProgrammaticStreamSerialization:
                request.is_dependent = attribute.val.programmaticStreamSerializationAllowed != 0;
                break;
            case cudaLaunchAttributeIgnore:
            case cudaLaunchAttributeClusterSchedulingPolicyPreference:
            case cudaLaunchAttributePriority:
            case cudaLaunchAttributePreferredSharedMemoryCarveout:
                break;
            default:
                return fail(cudaErrorNotSupported,
                            "the emulator does not know launch attribute " + std::to_string(attribute.id));
        }
    }
    return cudaSuccess;
}

cudaError_t occupancy(const Kernel& kernel, const Code& code, int block_size, size_t shared_bytes, int& num_ctas) {
    if (block_size <= 0 || block_size > 1024) return fail(cudaErrorInvalidValue);
    const int64_t dynamic_bytes = static_cast<int64_t>(shared_bytes);
    num_ctas = 0;
    if (dynamic_bytes <= most_dynamic_bytes(kernel, code.program)) {
        const auto threads = static_cast<uint32_t>((block_size + 31) / 32 * 32);
        const int64_t bytes = code.program.static_shared_bytes + dynamic_bytes;
        num_ctas = static_cast<int>(ctas_per_sm(device().most_shared_bytes, threads, bytes));
    }
    return cudaSuccess;
}

cudaError_t cluster_occupancy(const Kernel& kernel, const Code& code, const Request& request, int& num_clusters) {
    const dim3& block = request.block;
    const auto& cluster = request.cluster;
    int num_ctas = 0;
    const cudaError_t error =
        occupancy(kernel, code, static_cast<int>(block.x * block.y * block.z), request.shared_bytes, num_ctas);
    const int64_t ctas_of_cluster = std::max<int64_t>(1, int64_t{cluster[0]} * cluster[1] * cluster[2]);
    num_clusters = static_cast<int>(int64_t{num_ctas} * device().num_sms / ctas_of_cluster);
    return error;
}

cudaError_t allow_dynamic_bytes(Kernel& kernel, const Code& code, int bytes) {
    if (bytes < 0 || bytes + code.program.static_shared_bytes > device().most_shared_bytes) {
        return fail(cudaErrorInvalidValue, "invalid argument: " + std::to_string(bytes) +
                                               " bytes of dynamic shared memory on a device that has " +
                                               std::to_string(device().most_shared_bytes) + " for a CTA");
    }
    kernel.allow_dynamic_bytes(device_index(), bytes);
    return cudaSuccess;
}

namespace {

// A launch whose arguments have been copied, so that a graph can run it repeatedly.
struct Prepared {
    Code code;
    Launch launch;
    int device;
    bool is_cooperative, is_dependent;
    cudaStream_t stream;

    cudaError_t run() const;
};

cudaError_t Prepared::run() const try {
    uint64_t workspace = 0;
    const GlobalMemory memory = memory_of(*code.module, workspace, launch.tracked, device);
    Launch ready = launch;
    ready.memory = &memory;
    if (is_cooperative) ready.grid_workspace = reinterpret_cast<uint64_t>(&workspace);
    std::function<void(const Launched&)> listener;
    int runs;
    {
        const std::lock_guard lock(mutex);
        listener = current_listener;
        runs = current_runs;
    }
    ready.before = take_accesses(stream);
    if (!is_dependent) ready.before = nullptr;  // frees the records before this launch makes its own
    for (int run = 0; run < runs; ++run) {
        const Report report = run_launch(ready);
        ready.before = nullptr;
        keep_accesses(stream, report.accesses);
        if (listener) listener({code.program, ready, report});
    }
    return cudaSuccess;
} catch (const Fault& fault) {
    return fail(fault);
}

}  // namespace

cudaError_t launch(const Kernel& kernel, const Request& request) try {
    const std::optional<Code> code = code_of(kernel);
    if (!code) {
        return fail(cudaErrorNoKernelImageForDevice,
                    "no kernel image is available for execution on the device: " + kernel.name);
    }
    const cudaError_t error = check(kernel, code->program, request);
    if (error != cudaSuccess) return error;

    const Device device = runtime::device();
    Launch launch{options()};
    launch.program = &code->program;
    launch.parameters = packed(code->program, request.arguments);
    const auto set = [](uint32_t (&to)[3], const dim3& from) { to[0] = from.x, to[1] = from.y, to[2] = from.z; };
    set(launch.grid, request.grid);
    set(launch.block, request.block);
    std::copy(request.cluster.begin(), request.cluster.end(), launch.cluster);
    launch.shared_bytes = static_cast<int64_t>(request.shared_bytes);
    launch.num_sms = device.num_sms;
    launch.races = launch.races && !kernel.may_race();
    launch.replicated_stores = kernel.is_tritons;  // Triton lets all warps that hold a value store it
    uint64_t workspace = 0;
    if (request.is_cooperative) launch.grid_workspace = reinterpret_cast<uint64_t>(&workspace);  // for check_launch
    check_launch(device.most_shared_bytes, launch);
    const Prepared prepared{
        *code, std::move(launch), device_index(), request.is_cooperative, request.is_dependent, request.stream};
    return submit(request.stream, kernel.name, [prepared] { return prepared.run(); }, /*needs_own_device=*/true);
} catch (const Fault& fault) {
    return fail(fault);
}

}  // namespace emulator::runtime
