// The functions of the driver API that torch, Triton and Inductor call: contexts, modules of PTX, functions and
// launches. A CUresult has the same number as the runtime's error of the same meaning.
#include "exports.h"

#pragma GCC visibility push(default)
#include <cuda.h>
#pragma GCC visibility pop

#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "allocations.h"
#include "device.h"
#include "errors.h"
#include "launching.h"
#include "streams.h"
#include "tensor_map.h"

using namespace emulator;
using namespace emulator::runtime;

namespace {

// Converts an error to a CUresult. cudaGetLastError must not see it, but its reason stays for cuGetErrorString.
CUresult driver(cudaError_t error) {
    if (error != cudaSuccess) cudaGetLastError();
    return static_cast<CUresult>(error);
}

// A module of PTX that cuModuleLoadData has loaded. Its kernels may be launched on every device, while the real driver
// binds a module to a context.
class DriverModule : public CodeSource {
  public:
    explicit DriverModule(const std::string& ptx)
        : module_(std::make_shared<LoadedModule>(ptx, SharedLayout::kFromBase)) {}

    std::shared_ptr<LoadedModule> load() override { return module_; }

    Kernel& kernel(const std::string& name) {
        auto& found = kernels_[name];
        if (found == nullptr) found = std::make_unique<Kernel>(this, name, /*is_tritons=*/true);
        return *found;
    }

  private:
    std::shared_ptr<LoadedModule> module_;
    std::map<std::string, std::unique_ptr<Kernel>> kernels_;
};

std::mutex mutex;

// The context of a device is the address of its element of an array.
CUcontext context_of(int device) {
    static char contexts[64];
    return reinterpret_cast<CUcontext>(&contexts[device]);
}

int device_of(CUcontext context) {
    return static_cast<int>(reinterpret_cast<char*>(context) - reinterpret_cast<char*>(context_of(0)));
}

CUresult load(CUmodule* module, const std::string& image) try {
    if (image.find(".version") == std::string::npos) {
        return driver(fail(cudaErrorInvalidKernelImage, "the emulated driver takes modules of PTX alone"));
    }
    *module = reinterpret_cast<CUmodule>(new DriverModule(image));
    return CUDA_SUCCESS;
} catch (const Fault& fault) {
    return driver(fail(fault));
}

Kernel& kernel_of(CUfunction function) {
    return *reinterpret_cast<Kernel*>(function);
}

template <typename Function>
CUresult with_code(CUfunction function, Function&& body) try {
    Kernel& kernel = kernel_of(function);
    return driver(body(kernel, *code_of(kernel)));
} catch (const Fault& fault) {
    return driver(fail(fault));
}

// Returns the addresses of a kernel's arguments in the buffer that `extra` names.
std::vector<void*> unpack(CUfunction function, void** extra) {
    char* buffer = nullptr;
    for (; *extra != CU_LAUNCH_PARAM_END; extra += 2) {
        if (*extra == CU_LAUNCH_PARAM_BUFFER_POINTER) buffer = static_cast<char*>(extra[1]);
    }
    std::vector<void*> found;
    for (const Parameter& parameter : code_of(kernel_of(function))->program.parameters) {
        found.push_back(buffer + parameter.offset);
    }
    return found;
}

// Host code queries attributes of later drivers to detect whether they exist, so that those only return an error code.
cudaError_t unknown_attribute(CUfunction_attribute attribute) {
    if (attribute >= CU_FUNC_ATTRIBUTE_MAX) return cudaErrorInvalidValue;
    return fail(cudaErrorNotSupported, "the emulator does not know function attribute " + std::to_string(attribute));
}

CUresult not_there() {
    return driver(fail(cudaErrorNotSupported, "the emulator does not have this function of the driver"));
}

}  // namespace

// --- Devices and contexts ---

CUresult cuInit(unsigned) {
    return CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int* version) {
    return driver(cudaDriverGetVersion(version));
}

CUresult cuDeviceGetCount(int* count) {
    return driver(cudaGetDeviceCount(count));
}

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
    if (!runtime::device(ordinal)) return driver(fail(cudaErrorInvalidDevice));
    *device = ordinal;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
    return driver(cudaDeviceGetAttribute(value, static_cast<cudaDeviceAttr>(attribute), device));
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
    if (!runtime::device(device)) return driver(fail(cudaErrorInvalidDevice));
    *context = context_of(device);
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
    *flags = 0;
    *active = has_context(device) ? 1 : 0;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext* context) {
    const int device = device_index();
    *context = has_context(device) && !lacks_context() ? context_of(device) : nullptr;
    return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) {
    if (context == nullptr) return CUDA_SUCCESS;
    return make_current(device_of(context)) ? CUDA_SUCCESS : driver(fail(cudaErrorInvalidDevice));
}

CUresult cuCtxGetDevice(CUdevice* device) {
    *device = device_index();
    return CUDA_SUCCESS;
}

CUresult cuCtxGetLimit(size_t* value, CUlimit) {
    *value = 1 << 20;  // the default size of printf's buffer, which the emulator does not need
    return CUDA_SUCCESS;
}

CUresult cuCtxSetLimit(CUlimit, size_t) {
    return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char** text) {
    *text = cudaGetErrorString(static_cast<cudaError_t>(error));
    return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult error, const char** name) {
    *name = cudaGetErrorName(static_cast<cudaError_t>(error));
    return CUDA_SUCCESS;
}

// --- Memory ---

CUresult cuPointerGetAttribute(void* data, CUpointer_attribute attribute, CUdeviceptr address) {
    cudaPointerAttributes found;
    cudaPointerGetAttributes(&found, reinterpret_cast<const void*>(address));
    if (found.type == cudaMemoryTypeUnregistered) {
        return driver(fail(cudaErrorInvalidValue, "invalid argument: memory that the device does not know"));
    }
    switch (attribute) {
        case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
            *static_cast<CUdeviceptr*>(data) = address;
            return CUDA_SUCCESS;
        case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
            *static_cast<int*>(data) = found.device;
            return CUDA_SUCCESS;
        case CU_POINTER_ATTRIBUTE_CONTEXT:
            *static_cast<CUcontext*>(data) = context_of(found.device);
            return CUDA_SUCCESS;
        case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
            *static_cast<unsigned*>(data) =
                found.type == cudaMemoryTypeHost ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
            return CUDA_SUCCESS;
        default:
            return driver(fail(cudaErrorNotSupported,
                               "the emulator does not know pointer attribute " + std::to_string(attribute)));
    }
}

CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType data_type, cuuint32_t rank, void* address,
                                const cuuint64_t* dims, const cuuint64_t* strides, const cuuint32_t* box,
                                const cuuint32_t* element_strides, CUtensorMapInterleave interleave,
                                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                CUtensorMapFloatOOBfill fill) {
    if (lacks_context()) return driver(fail(cudaErrorDeviceUninitialized, "a tensor map: this thread has no context"));
    std::string reason;
    const int error = encode_tiled(map, data_type, rank, address, dims, strides, box, element_strides, interleave,
                                   swizzle, promotion, fill, &reason);
    if (error == 0 && !reason.empty()) warn("a tensor map: " + reason);
    return error == 0 ? CUDA_SUCCESS : driver(fail(static_cast<cudaError_t>(error), "a tensor map: " + reason));
}

// --- Modules and functions ---

CUresult cuModuleLoadData(CUmodule* module, const void* image) {
    return load(module, static_cast<const char*>(image));
}

CUresult cuModuleLoadDataEx(CUmodule* module, const void* image, unsigned, CUjit_option*, void**) {
    return cuModuleLoadData(module, image);
}

CUresult cuModuleLoad(CUmodule* module, const char* path) {
    std::ifstream file(path);
    if (!file) return driver(fail(cudaErrorInvalidValue, std::string("there is no file ") + path));
    return load(module, std::string(std::istreambuf_iterator<char>(file), {}));
}

CUresult cuModuleUnload(CUmodule module) {
    delete reinterpret_cast<DriverModule*>(module);
    return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) try {
    const std::lock_guard lock(mutex);
    Kernel& kernel = reinterpret_cast<DriverModule*>(module)->kernel(name);
    code_of(kernel);  // throws if there is no such kernel, or if it has an unsupported instruction
    *function = reinterpret_cast<CUfunction>(&kernel);
    return CUDA_SUCCESS;
} catch (const Fault& fault) {
    return driver(fail(fault));
}

CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction function) {
    return with_code(function, [&](const Kernel& kernel, const Code& code) {
        switch (attribute) {
            case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
                *value = 1024;
                return cudaSuccess;
            case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES:
                *value = static_cast<int>(code.program.static_shared_bytes);
                return cudaSuccess;
            case CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES:
            case CU_FUNC_ATTRIBUTE_NUM_REGS:  // only ptxas knows them
                *value = 0;
                return cudaSuccess;
            case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
                *value = static_cast<int>(most_dynamic_bytes(kernel, code.program));
                return cudaSuccess;
            default:
                return unknown_attribute(attribute);
        }
    });
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
    return with_code(function, [&](Kernel& kernel, const Code& code) {
        switch (attribute) {
            case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
                return allow_dynamic_bytes(kernel, code, value);
            case CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED:
                kernel.may_have_large_clusters = value != 0;
                return cudaSuccess;
            case CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT:  // a performance hint
                return cudaSuccess;
            default:
                return unknown_attribute(attribute);
        }
    });
}

CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) {
    return CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** arguments, void** extra) {
    std::vector<void*> unpacked;
    if (extra != nullptr) {
        unpacked = unpack(function, extra);
        arguments = unpacked.data();
    }
    static_assert(sizeof(CUlaunchAttribute) == sizeof(cudaLaunchAttribute));
    Request request{{config->gridDimX, config->gridDimY, config->gridDimZ},
                    {config->blockDimX, config->blockDimY, config->blockDimZ},
                    {},
                    arguments,
                    config->sharedMemBytes,
                    config->hStream};
    const auto* attributes = reinterpret_cast<const cudaLaunchAttribute*>(config->attrs);
    if (const cudaError_t error = apply(attributes, config->numAttrs, request); error != cudaSuccess) {
        return driver(error);
    }
    return driver(launch(kernel_of(function), request));
}

CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                        unsigned block_y, unsigned block_z, unsigned shared_bytes, CUstream stream, void** arguments,
                        void** extra) {
    const CUlaunchConfig config{grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes, stream, nullptr, 0};
    return cuLaunchKernelEx(&config, function, arguments, extra);
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* num_ctas, CUfunction function, int block_size,
                                                     size_t shared_bytes) {
    return with_code(function, [&](const Kernel& kernel, const Code& code) {
        return occupancy(kernel, code, block_size, shared_bytes, *num_ctas);
    });
}

CUresult cuOccupancyMaxActiveClusters(int* num_clusters, CUfunction function, const CUlaunchConfig* config) {
    return with_code(function, [&](const Kernel& kernel, const Code& code) {
        Request request{{config->gridDimX, config->gridDimY, config->gridDimZ},
                        {config->blockDimX, config->blockDimY, config->blockDimZ},
                        {1, 1, 1},
                        nullptr,
                        config->sharedMemBytes};
        const auto* attributes = reinterpret_cast<const cudaLaunchAttribute*>(config->attrs);
        if (const cudaError_t error = apply(attributes, config->numAttrs, request); error != cudaSuccess) return error;
        return cluster_occupancy(kernel, code, request, *num_clusters);
    });
}

// --- Functions for code that torch compiles at run time (NVRTC): not supported ---

CUresult cuLinkCreate(unsigned, CUjit_option*, void**, CUlinkState*) {
    return not_there();
}

CUresult cuLinkAddData(CUlinkState, CUjitInputType, void*, size_t, const char*, unsigned, CUjit_option*, void**) {
    return not_there();
}

CUresult cuLinkComplete(CUlinkState, void**, size_t*) {
    return not_there();
}

CUresult cuLaunchCooperativeKernel(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                                   CUstream, void**) {
    return not_there();
}

cudaError_t cudaLibraryLoadData(cudaLibrary_t*, const void*, cudaJitOption*, void**, unsigned, cudaLibraryOption*,
                                void**, unsigned) {
    return static_cast<cudaError_t>(not_there());
}

cudaError_t cudaLibraryGetKernel(cudaKernel_t*, cudaLibrary_t, const char*) {
    return static_cast<cudaError_t>(not_there());
}

cudaError_t cudaLibraryUnload(cudaLibrary_t) {
    return static_cast<cudaError_t>(not_there());
}

// --- Entry points by name ---

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned version, unsigned long long,
                                             cudaDriverEntryPointQueryResult* status) {
    // torch looks all of these up when it starts. `absent` ones, mostly for virtual memory, fail when they are called.
    static const std::map<std::string, void*> known = {
#define EMULATOR_ENTRY(name) {#name, reinterpret_cast<void*>(&name)}
        EMULATOR_ENTRY(cuCtxGetCurrent),
        EMULATOR_ENTRY(cuCtxSetCurrent),
        EMULATOR_ENTRY(cuDeviceGet),
        EMULATOR_ENTRY(cuDeviceGetAttribute),
        EMULATOR_ENTRY(cuDeviceGetCount),
        EMULATOR_ENTRY(cuDevicePrimaryCtxGetState),
        EMULATOR_ENTRY(cuGetErrorName),
        EMULATOR_ENTRY(cuGetErrorString),
        EMULATOR_ENTRY(cuInit),
        EMULATOR_ENTRY(cuPointerGetAttribute),
        EMULATOR_ENTRY(cuTensorMapEncodeTiled),
#undef EMULATOR_ENTRY
    };
    static const char* const absent[] = {"cuMem",
                                         "cuMulticast",
                                         "cuStreamWriteValue",
                                         "cuCtxFromGreenCtx",
                                         "cuGreenCtx",
                                         "cuDevSm",
                                         "cuDevResource",
                                         "cuDeviceGetDevResource",
                                         "cuCtxPushCurrent",
                                         "cuCtxPopCurrent",
                                         "cuLaunchCooperativeKernel"};
    const auto found = known.find(name);
    *function = found != known.end() && version <= kCudaVersion ? found->second : nullptr;
    for (const char* prefix : absent) {
        if (std::strncmp(name, prefix, std::strlen(prefix)) == 0) *function = reinterpret_cast<void*>(&not_there);
    }
    if (*function != nullptr) {
        if (status != nullptr) *status = cudaDriverEntryPointSuccess;
        return cudaSuccess;
    }
    if (status == nullptr) return fail(cudaErrorSymbolNotFound, std::string("the emulator has no ") + name);
    *status = cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPoint(const char* name, void** function, unsigned long long flags,
                                    cudaDriverEntryPointQueryResult* status) {
    return cudaGetDriverEntryPointByVersion(name, function, kCudaVersion, flags, status);
}
