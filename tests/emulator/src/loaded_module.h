// A PTX module that launches can use: parsed, with memory for its variables, and its kernels decoded as they are needed.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "decoder.h"
#include "machine.h"

namespace emulator {

class LoadedModule {
  public:
    // Throws a Fault of kind "syntax".
    explicit LoadedModule(std::string text, SharedLayout layout = SharedLayout::kLeastAligned);

    std::vector<std::string> kernels() const;
    // Throws a Fault where there is no such kernel, or it has an instruction that is not known.
    const Program& program(const std::string& kernel);
    // The host's address of a variable in global or constant memory; 0: there is none of that name.
    uint64_t variable(const std::string& name) const;
    const std::vector<Allocation>& allocations() const { return allocations_; }
    const ptx::Module& source() const { return module_; }

  private:
    ptx::Module module_;
    const SharedLayout layout_;
    std::vector<std::vector<std::byte>> storage_;
    VariableAddresses variables_;
    std::vector<Allocation> allocations_;
    std::mutex mutex_;
    std::map<std::string, std::unique_ptr<Program>> programs_;
};

// What a GPU with code for `target` (such as "sm_80") lets a CTA have of shared memory.
int64_t most_shared_bytes(std::string_view target);

// How many CTAs an SM holds at a time, by threads and shared memory: how many registers a thread has is for ptxas to
// say. 0: not even one.
uint32_t ctas_per_sm(int64_t most_shared_bytes, uint32_t threads, int64_t shared_bytes);

// The memory of a cooperative launch's grid_workspace.
Allocation allocation_of(const uint64_t& workspace);

// Checks the size of CTAs and of clusters, the shared memory, and whether all CTAs of a cooperative launch can run at a
// time; fills in the cluster of a launch that asks for none ({0, …}), and its num_resident. The other members are set.
// Throws a Fault of kind "arguments".
void check_launch(int64_t most_shared_bytes, Launch& launch);

}  // namespace emulator
