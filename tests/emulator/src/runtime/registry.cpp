#include "registry.h"

#include "exports.h"

namespace emulator::runtime {

void Kernel::allow_dynamic_bytes(int device, int64_t bytes) {
    const std::lock_guard lock(mutex_);
    dynamic_bytes_[device] = bytes;
}

std::optional<int64_t> Kernel::allowed_dynamic_bytes(int device) const {
    const std::lock_guard lock(mutex_);
    const auto found = dynamic_bytes_.find(device);
    return found == dynamic_bytes_.end() ? std::nullopt : std::optional(found->second);
}

Registry& Registry::instance() {
    static Registry* const registry = new Registry;
    return *registry;
}

FatBinary* Registry::add(const void* wrapper) {
    const std::lock_guard lock(mutex_);
    auto binary = std::make_unique<FatBinary>(wrapper);
    FatBinary* const address = binary.get();
    binaries_[address] = std::move(binary);
    return address;
}

void Registry::remove(FatBinary* binary) {
    const std::lock_guard lock(mutex_);
    for (auto it = kernels_.begin(); it != kernels_.end();) {
        it = it->second->binary == binary ? kernels_.erase(it) : std::next(it);
    }
    for (auto it = variables_.begin(); it != variables_.end();) {
        it = it->second.binary == binary ? variables_.erase(it) : std::next(it);
    }
    binaries_.erase(binary);
}

void Registry::add_kernel(const void* host_function, FatBinary* binary, const std::string& name) {
    const std::lock_guard lock(mutex_);
    kernels_[host_function] = std::make_unique<Kernel>(binary, name);
}

void Registry::add_variable(const void* host_variable, FatBinary* binary, const std::string& name, size_t bytes) {
    const std::lock_guard lock(mutex_);
    variables_[host_variable] = {binary, name, bytes};
}

Kernel* Registry::kernel(const void* function) {
    const std::lock_guard lock(mutex_);
    const auto found = kernels_.find(function);
    if (found != kernels_.end()) return found->second.get();
    for (const auto& [host_function, kernel] : kernels_) {
        if (kernel.get() == function) return kernel.get();
    }
    return nullptr;
}

const Variable* Registry::variable(const void* host_variable) {
    const std::lock_guard lock(mutex_);
    const auto found = variables_.find(host_variable);
    return found == variables_.end() ? nullptr : &found->second;
}

}  // namespace emulator::runtime

using namespace emulator::runtime;

// A handle is the FatBinary.

void** __cudaRegisterFatBinary(void* wrapper) {
    return reinterpret_cast<void**>(Registry::instance().add(wrapper));
}

void __cudaRegisterFatBinaryEnd(void**) {}

void __cudaUnregisterFatBinary(void** handle) {
    Registry::instance().remove(reinterpret_cast<FatBinary*>(handle));
}

void __cudaRegisterFunction(void** handle, const char* host_function, char*, const char* name, int, uint3*, uint3*,
                            dim3*, dim3*, int*) {
    Registry::instance().add_kernel(host_function, reinterpret_cast<FatBinary*>(handle), name);
}

void __cudaRegisterVar(void** handle, char* host_variable, char*, const char* name, int, size_t bytes, int, int) {
    Registry::instance().add_variable(host_variable, reinterpret_cast<FatBinary*>(handle), name, bytes);
}

char __cudaInitModule(void**) {
    return 1;
}
