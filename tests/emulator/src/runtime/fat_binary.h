// The container that nvcc embeds for each source file: its PTX texts, one for each virtual architecture.
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
    bool is_specific = false;  // of "sm_90a": for that compute capability alone
    std::string_view text;     // where the library's file is mapped
};

// `wrapper`: what nvcc's code hands to __cudaRegisterFatBinary. Machine code is skipped. Throws a Fault of kind
// "arguments" for what is no such container or is compressed.
std::vector<PtxText> read_fat_binary(const void* wrapper);

// The one that a driver would compile: the newest that the device runs, a specific one before others; nullptr: none.
const PtxText* choose(const std::vector<PtxText>& texts, const Device& device);

// From now on, modules are made of their PTX with `instead` in place of each `text`, which must occur: so a test sees
// what a fault in a kernel does. An empty `text`: of the PTX as it is.
void replace_in_ptx(const std::string& text, const std::string& instead, const std::string& kernel);

// Where a kernel's code comes from: a container in a library, or a module that the driver has loaded.
class CodeSource {
  public:
    virtual ~CodeSource() = default;
    // For the current device; nullptr: nothing here runs on it. Throws Faults.
    virtual std::shared_ptr<LoadedModule> load() = 0;
};

// A registered container. Its modules are parsed when something of them is needed, and kept for a while.
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
