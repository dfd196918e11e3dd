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
    binaries_[address].container = std::move(binary);
    return address;
}

void Registry::remove(FatBinary* binary) {
    const std::lock_guard lock(mutex_);
    const auto found = binaries_.find(binary);
    if (found == binaries_.end()) return;
    for (const void* kernel : found->second.kernels) {
        handles_.erase(kernels_[kernel].get());
        kernels_.erase(kernel);
    }
    for (const void* variable : found->second.variables) variables_.erase(variable);
    binaries_.erase(found);
}

void Registry::add_kernel(const void* host_function, FatBinary* binary, const std::string& name) {
    const std::lock_guard lock(mutex_);
    auto& kernel = kernels_[host_function] = std::make_unique<Kernel>(binary, name);
    handles_.insert(kernel.get());
    binaries_[binary].kernels.push_back(host_function);
}

void Registry::add_variable(const void* host_variable, FatBinary* binary, const std::string& name, size_t bytes) {
    const std::lock_guard lock(mutex_);
    variables_[host_variable] = {binary, name, bytes};
    binaries_[binary].variables.push_back(host_variable);
}

Kernel* Registry::kernel(const void* function) {
    const std::lock_guard lock(mutex_);
    const auto found = kernels_.find(function);
    if (found != kernels_.end()) return found->second.get();
    auto* const handle = static_cast<Kernel*>(const_cast<void*>(function));
    return handles_.count(handle) != 0 ? handle : nullptr;
}

const Variable* Registry::variable(const void* host_variable) {
    const std::lock_guard lock(mutex_);
    const auto found = variables_.find(host_variable);
    return found == variables_.end() ? nullptr : &found->second;
}

}  // namespace emulator::runtime

using namespace emulator::runtime;

// The handle of a fat binary is the address of its FatBinary.

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
