// A PTX module that is ready for launches: parsed, with memory for its variables. Kernels are decoded on first use.
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
    // Throws a Fault if there is no such kernel, or if it has an unsupported instruction.
    const Program& program(const std::string& kernel);
    // Returns the host's address of a .global or .const variable, 0 if there is none of that name.
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

// Returns the most shared memory that a CTA may have on a GPU of architecture `target` (such as "sm_80"), in bytes.
int64_t most_shared_bytes(std::string_view target);

// Returns the number of CTAs that fit on an SM by threads and shared memory. Registers do not count, because only ptxas
// knows how many a thread needs.
uint32_t ctas_per_sm(int64_t most_shared_bytes, uint32_t threads, int64_t shared_bytes);

// Returns the allocation for a cooperative launch's grid_workspace.
Allocation allocation_of(const uint64_t& workspace);

// Checks the sizes of CTAs and clusters, the shared memory, and whether all CTAs of a cooperative launch fit on the
// device at the same time. Fills in the cluster of a launch that states none ({0, …}), and num_resident. The caller has
// set all other members. Throws a Fault of kind "arguments".
void check_launch(int64_t most_shared_bytes, Launch& launch);

}  // namespace emulator
