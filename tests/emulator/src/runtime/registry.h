// What host code has registered: the kernels and variables of its source files, found by the host's addresses.
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

// A __global__ function. It is what a cudaKernel_t or a CUfunction points to.
struct Kernel {
    Kernel(CodeSource* source, std::string name, bool is_tritons = false)
        : source(source), name(std::move(name)), is_tritons(is_tritons) {}

    CodeSource* const source;
    const std::string name;
    const bool is_tritons;
    // Inductor changes blocks in place that have fewer elements than threads: all warps load them, and one stores them.
    // That is a race, and harmless where nothing else is made of what was loaded.
    bool may_race() const { return is_tritons && name.rfind("triton_", 0) == 0; }
    // Of cudaFuncSetAttribute, from any thread.
    std::atomic<bool> may_have_large_clusters{false};
    void allow_dynamic_bytes(int device, int64_t bytes);
    std::optional<int64_t> allowed_dynamic_bytes(int device) const;  // of shared memory; nullopt: not set on the device

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
    // The only one. It is never destroyed: libraries unregister when nearly all else of the process is gone.
    static Registry& instance();

    FatBinary* add(const void* wrapper);
    void remove(FatBinary* binary);
    void add_kernel(const void* host_function, FatBinary* binary, const std::string& name);
    void add_variable(const void* host_variable, FatBinary* binary, const std::string& name, size_t bytes);

    // nullptr: nobody registered it. A kernel is found by its host function or by its cudaKernel_t.
    Kernel* kernel(const void* function);
    const Variable* variable(const void* host_variable);

  private:
    std::mutex mutex_;
    struct Binary {
        std::unique_ptr<FatBinary> container;
        std::vector<const void*> kernels, variables;  // the host's addresses
    };
    std::map<FatBinary*, Binary> binaries_;
    std::map<const void*, std::unique_ptr<Kernel>> kernels_;
    std::set<const Kernel*> handles_;
    std::map<const void*, Variable> variables_;
};

}  // namespace emulator::runtime
