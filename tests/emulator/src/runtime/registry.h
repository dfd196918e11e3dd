// The kernels and variables that host code has registered, by their addresses on the host.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "fat_binary.h"

namespace emulator::runtime {

// A __global__ function. A cudaKernel_t or a CUfunction points to it.
struct Kernel {
    Kernel(CodeSource* source, std::string name, bool is_tritons = false)
        : source(source), name(std::move(name)), is_tritons(is_tritons) {}

    CodeSource* const source;
    const std::string name;
    const bool is_tritons;
    // True for kernels of Inductor, which update in place blocks with fewer elements than threads. All warps load such
    // a block, and one warp stores it. This race is harmless as long as only the storing warp uses the loaded values.
    bool may_race() const { return is_tritons && name.rfind("triton_", 0) == 0; }
    // Attributes that cudaFuncSetAttribute sets, from any thread.
    std::atomic<bool> may_have_large_clusters{false};
    void allow_dynamic_bytes(int device, int64_t bytes);
    std::optional<int64_t> allowed_dynamic_bytes(int device) const;  // shared memory; nullopt: not set for the device

  private:
    mutable std::mutex mutex_;
    std::map<int, int64_t> dynamic_bytes_;
};

// A __device__ or __constant__ variable.
struct Variable {
    FatBinary* binary;
    std::string name;
    size_t bytes;
};

class Registry {
  public:
    // Returns the only instance. It is never destroyed, because libraries unregister late during the process's exit.
    static Registry& instance();

    FatBinary* add(const void* wrapper);
    void remove(FatBinary* binary);
    void add_kernel(const void* host_function, FatBinary* binary, const std::string& name);
    void add_variable(const void* host_variable, FatBinary* binary, const std::string& name, size_t bytes);

    // Both return nullptr for what is not registered. `function` is a kernel's host function or its cudaKernel_t.
    Kernel* kernel(const void* function);
    const Variable* variable(const void* host_variable);

  private:
    std::mutex mutex_;
    struct Binary {
        std::unique_ptr<FatBinary> container;
        std::vector<const void*> kernels, variables;  // their addresses on the host
    };
    std::map<FatBinary*, Binary> binaries_;
    std::map<const void*, std::unique_ptr<Kernel>> kernels_;
    std::set<const Kernel*> handles_;
    std::map<const void*, Variable> variables_;
};

}  // namespace emulator::runtime
