// The fat binary that nvcc embeds for each source file: a container with one PTX text for each virtual architecture.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "device.h"
#include "loaded_module.h"

namespace emulator::runtime {

struct PtxText {
    int arch = 0;              // compute capability times ten
    bool is_specific = false;  // as in "sm_90a": runs on that compute capability only
    std::string_view text;     // points into the mapped library
};

// Returns the PTX texts of a container and skips its machine code. `wrapper` is the argument of
// __cudaRegisterFatBinary. Throws a Fault of kind "arguments" if it is no such container, or compressed.
std::vector<PtxText> read_fat_binary(const void* wrapper);

// Returns the newest text that the device can run (a specific one first), as a driver chooses it; nullptr if none.
const PtxText* choose(const std::vector<PtxText>& texts, const Device& device);

// Plants a fault for a test: from now on, modules that contain `kernel` are loaded with `instead` in place of every
// `text`, which must occur in their PTX. An empty `text` ends this.
void replace_in_ptx(const std::string& text, const std::string& instead, const std::string& kernel);

// The source of a kernel's code: a container in a library, or a module that the driver API loaded.
class CodeSource {
  public:
    virtual ~CodeSource() = default;
    // Returns the module for the current device, nullptr if no code runs on it. Throws a Fault for invalid code.
    virtual std::shared_ptr<LoadedModule> load() = 0;
};

// A registered container. Its modules are parsed on first use, and kept in a cache.
class FatBinary : public CodeSource {
  public:
    explicit FatBinary(const void* wrapper) : wrapper_(wrapper) {}

    ~FatBinary() override;
    std::shared_ptr<LoadedModule> load() override;

  private:
    const void* wrapper_;
    std::mutex mutex_;
    bool is_read_ = false;
    std::vector<PtxText> texts_;
};

}  // namespace emulator::runtime
