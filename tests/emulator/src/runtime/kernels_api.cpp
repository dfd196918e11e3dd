// CUDA runtime functions that launch kernels, or query and set their attributes.
#include <algorithm>
#include <cstring>
#include <vector>

#include "errors.h"
#include "exports.h"
#include "launching.h"

using namespace emulator;
using namespace emulator::runtime;

namespace {

// The configuration of kernel<<<…>>>, until its stub fetches it.
struct Configuration {
    dim3 grid, block;
    size_t shared_bytes;
    cudaStream_t stream;
};
thread_local std::vector<Configuration> configurations;

// Calls function(kernel, code) for a registered kernel with code for the device, and converts Faults to errors.
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
                               cudaStream_t stream) {
    return launch_registered(kernel, {grid, block, {}, arguments, shared_bytes, stream});
}

cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void** arguments, size_t shared_bytes,
                             cudaStream_t stream) {
    return launch_registered(function, {grid, block, {}, arguments, shared_bytes, stream});
}

cudaError_t cudaLaunchCooperativeKernel(const void* function, dim3 grid, dim3 block, void** arguments,
                                        size_t shared_bytes, cudaStream_t stream) {
    return launch_registered(function, {grid, block, {}, arguments, shared_bytes, stream, /*is_cooperative=*/true});
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function, void** arguments) {
    Request request{config->gridDim, config->blockDim, {}, arguments, config->dynamicSmemBytes, config->stream};
    const cudaError_t error = apply(config->attrs, config->numAttrs, request);
    return error != cudaSuccess ? error : launch_registered(function, request);
}

cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute attribute, int value) {
    ++attribute_calls;
    return with_code(function, [&](Kernel& kernel, const Code& code) {
        switch (attribute) {
            case cudaFuncAttributeMaxDynamicSharedMemorySize:
                return allow_dynamic_bytes(kernel, code, value);
            case cudaFuncAttributeNonPortableClusterSizeAllowed:
                kernel.may_have_large_clusters = value != 0;
                return cudaSuccess;
            case cudaFuncAttributePreferredSharedMemoryCarveout:  // both are performance hints
            case cudaFuncAttributeClusterSchedulingPolicyPreference:
                return cudaSuccess;
            default:
                return not_emulated("function attribute", attribute);
        }
    });
}

cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t kernel, cudaFuncAttribute attribute, int value, int device) {
    const int before = device_index();
    if (!make_current(device)) return fail(cudaErrorInvalidDevice);
    const cudaError_t error = cudaFuncSetAttribute(kernel, attribute, value);
    make_current(before);
    return error;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* function) {
    return with_code(function, [&](const Kernel& kernel, const Code& code) {
        const ptx::Function& source = *code.program.functions[0]->source;
        uint64_t most_threads = 1;
        for (const int threads : source.most_threads) most_threads *= threads;
        std::memset(attributes, 0, sizeof(*attributes));  // numRegs stays 0, because only ptxas knows it
        attributes->sharedSizeBytes = code.program.static_shared_bytes;
        attributes->localSizeBytes = code.program.functions[0]->local_bytes;
        attributes->maxThreadsPerBlock = most_threads == 0 ? 1024 : static_cast<int>(most_threads);
        attributes->ptxVersion = attributes->binaryVersion =
            std::stoi(code.program.module->target.substr(3));  // sm_90a: 90
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
        return occupancy(kernel, code, block_size, shared_bytes, *num_ctas);
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
        if (const cudaError_t error = apply(config->attrs, config->numAttrs, request); error != cudaSuccess)
            return error;
        return cluster_occupancy(kernel, code, request, *num_clusters);
    });
}
