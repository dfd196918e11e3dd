// The functions of CUDA's runtime that launch kernels, or ask and set what concerns a kernel.
#include <algorithm>
#include <cstring>
#include <vector>

#include "errors.h"
#include "exports.h"
#include "launching.h"

using namespace emulator;
using namespace emulator::runtime;

namespace {

// Of kernel<<<…>>> before its stub is called.
struct Configuration {
    dim3 grid, block;
    size_t shared_bytes;
    cudaStream_t stream;
};
thread_local std::vector<Configuration> configurations;

// Calls function(kernel, code) for what is registered and runs on the device, and makes errors of Faults.
template <typename Function>
cudaError_t with_code(const void* host_function, Function&& function) try {
    Kernel* kernel = Registry::instance().kernel(host_function);
    if (kernel == nullptr) return fail(cudaErrorInvalidDeviceFunction);
    const std::optional<Code> code = code_of(*kernel);
    if (!code) return fail(cudaErrorNoKernelImageForDevice);
    return function(*kernel, *code);
} catch (const Fault& fault) {
    return fail(fault);
}

cudaError_t launch_registered(const void* function, const Request& request) {
    const Kernel* kernel = Registry::instance().kernel(function);
    return kernel == nullptr ? fail(cudaErrorInvalidDeviceFunction) : launch(*kernel, request);
}

cudaError_t not_emulated(const char* what, int number) {
    return fail(cudaErrorNotSupported,
                std::string("the emulator does not know ") + what + ' ' + std::to_string(number));
}

// The attributes of a launch. Those that only say how fast something should be have no effect.
cudaError_t apply(const cudaLaunchConfig_t& config, Request& request) {
    for (unsigned i = 0; i < config.numAttrs; ++i) {
        const cudaLaunchAttribute& attribute = config.attrs[i];
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
            case cudaLaunchAttributeProgrammaticStreamSerialization:  // each launch starts when the last has ended
            case cudaLaunchAttributeIgnore:
            case cudaLaunchAttributeClusterSchedulingPolicyPreference:
            case cudaLaunchAttributePriority:
            case cudaLaunchAttributePreferredSharedMemoryCarveout:
                break;
            default:
                return not_emulated("launch attribute", attribute.id);
        }
    }
    return cudaSuccess;
}

uint64_t product(const std::array<uint32_t, 3>& size) {
    return uint64_t{size[0]} * size[1] * size[2];
}

// CTAs of a kernel that an SM holds at a time, by threads and shared memory.
cudaError_t occupancy(const Kernel& kernel, const Code& code, int block_size, size_t shared_bytes, uint32_t& num_ctas) {
    if (block_size <= 0 || block_size > 1024) return fail(cudaErrorInvalidValue);
    const int64_t dynamic_bytes = static_cast<int64_t>(shared_bytes);
    num_ctas = 0;
    if (dynamic_bytes <= most_dynamic_bytes(kernel, code.program)) {
        const auto threads = static_cast<uint32_t>((block_size + 31) / 32 * 32);
        num_ctas = ctas_per_sm(device().most_shared_bytes, threads, code.program.static_shared_bytes + dynamic_bytes);
    }
    return cudaSuccess;
}

}  // namespace

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream) {
    configurations.push_back({grid, block, shared_bytes, stream});
    return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes, void* stream) {
    if (configurations.empty()) return fail(cudaErrorMissingConfiguration);
    const Configuration& last = configurations.back();
    *grid = last.grid;
    *block = last.block;
    *shared_bytes = last.shared_bytes;
    *static_cast<cudaStream_t*>(stream) = last.stream;
    configurations.pop_back();
    return cudaSuccess;
}

cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* host_function) {
    Kernel* found = Registry::instance().kernel(host_function);
    if (found == nullptr) return fail(cudaErrorInvalidDeviceFunction);
    *kernel = reinterpret_cast<cudaKernel_t>(found);
    return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments, size_t shared_bytes,
                               cudaStream_t) {
    return launch_registered(kernel, {grid, block, {}, arguments, shared_bytes});
}

cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void** arguments, size_t shared_bytes,
                             cudaStream_t) {
    return launch_registered(function, {grid, block, {}, arguments, shared_bytes});
}

cudaError_t cudaLaunchCooperativeKernel(const void* function, dim3 grid, dim3 block, void** arguments,
                                        size_t shared_bytes, cudaStream_t) {
    return launch_registered(function, {grid, block, {}, arguments, shared_bytes, /*is_cooperative=*/true});
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function, void** arguments) {
    Request request{config->gridDim, config->blockDim, {}, arguments, config->dynamicSmemBytes};
    const cudaError_t error = apply(*config, request);
    return error != cudaSuccess ? error : launch_registered(function, request);
}

cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute attribute, int value) {
    ++attribute_calls;
    return with_code(function, [&](Kernel& kernel, const Code& code) {
        switch (attribute) {
            case cudaFuncAttributeMaxDynamicSharedMemorySize:
                if (value < 0 || value + code.program.static_shared_bytes > device().most_shared_bytes) {
                    return fail(cudaErrorInvalidValue, "invalid argument: " + std::to_string(value) +
                                                           " bytes of dynamic shared memory on a device that has " +
                                                           std::to_string(device().most_shared_bytes) + " for a CTA");
                }
                kernel.allow_dynamic_bytes(device_index(), value);
                return cudaSuccess;
            case cudaFuncAttributeNonPortableClusterSizeAllowed:
                kernel.may_have_large_clusters = value != 0;
                return cudaSuccess;
            case cudaFuncAttributePreferredSharedMemoryCarveout:  // say how fast something should be
            case cudaFuncAttributeClusterSchedulingPolicyPreference:
                return cudaSuccess;
            default:
                return not_emulated("function attribute", attribute);
        }
    });
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* function) {
    return with_code(function, [&](const Kernel& kernel, const Code& code) {
        const ptx::Function& source = *code.program.functions[0]->source;
        uint64_t most_threads = 1;
        for (const int threads : source.most_threads) most_threads *= threads;
        std::memset(attributes, 0, sizeof(*attributes));  // numRegs stays 0: ptxas would know
        attributes->sharedSizeBytes = code.program.static_shared_bytes;
        attributes->localSizeBytes = code.program.functions[0]->local_bytes;
        attributes->maxThreadsPerBlock = most_threads == 0 ? 1024 : static_cast<int>(most_threads);
        attributes->ptxVersion = attributes->binaryVersion = code.text.arch;
        attributes->maxDynamicSharedSizeBytes = static_cast<int>(most_dynamic_bytes(kernel, code.program));
        attributes->preferredShmemCarveout = -1;
        attributes->requiredClusterWidth = source.required_cluster[0];
        attributes->requiredClusterHeight = source.required_cluster[1];
        attributes->requiredClusterDepth = source.required_cluster[2];
        attributes->clusterDimMustBeSet = source.is_explicit_cluster ? 1 : 0;
        attributes->nonPortableClusterSizeAllowed = kernel.may_have_large_clusters ? 1 : 0;
        return cudaSuccess;
    });
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* num_ctas, const void* function, int block_size,
                                                          size_t shared_bytes) {
    return with_code(function, [&](const Kernel& kernel, const Code& code) {
        uint32_t found = 0;
        const cudaError_t error = occupancy(kernel, code, block_size, shared_bytes, found);
        *num_ctas = static_cast<int>(found);
        return error;
    });
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* num_ctas, const void* function, int block_size,
                                                                   size_t shared_bytes, unsigned flags) {
    if (flags != cudaOccupancyDefault && flags != cudaOccupancyDisableCachingOverride) {
        return fail(cudaErrorInvalidValue);
    }
    return cudaOccupancyMaxActiveBlocksPerMultiprocessor(num_ctas, function, block_size, shared_bytes);
}

cudaError_t cudaOccupancyMaxActiveClusters(int* num_clusters, const void* function, const cudaLaunchConfig_t* config) {
    return with_code(function, [&](const Kernel& kernel, const Code& code) {
        Request request{config->gridDim, config->blockDim, {1, 1, 1}, nullptr, config->dynamicSmemBytes};
        if (const cudaError_t error = apply(*config, request); error != cudaSuccess) return error;
        const dim3& block = request.block;
        uint32_t num_ctas = 0;
        const cudaError_t error =
            occupancy(kernel, code, static_cast<int>(block.x * block.y * block.z), request.shared_bytes, num_ctas);
        *num_clusters = static_cast<int>(uint64_t{num_ctas} * device().num_sms / product(request.cluster));
        return error;
    });
}
