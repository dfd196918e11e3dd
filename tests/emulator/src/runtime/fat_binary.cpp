#include "fat_binary.h"

#include <fatbinary_section.h>

#include <algorithm>
#include <cstring>
#include <list>

namespace emulator::runtime {
namespace {

// The format that nvcc 12 and 13 write. No CUDA header documents it.
struct ContainerHeader {
    uint32_t magic;
    uint16_t version, header_bytes;
    uint64_t bytes;  // size of what follows this header
};

struct EntryHeader {
    uint16_t kind, version;
    uint32_t header_bytes;
    uint64_t bytes;  // size of what follows this header, including padding
    uint32_t compressed_bytes, options;
    uint16_t minor, major;  // PTX version
    uint32_t arch;
    uint32_t name, name_bytes;
    uint64_t flags;
};

constexpr uint32_t kContainerMagic = 0xba55ed50;
constexpr uint16_t kPtx = 1;
constexpr uint64_t kCompressedFlags = 0xa000;  // LZ4 and zstd

bool is_specific(std::string_view text) {
    const size_t target = text.find(".target sm_");
    const size_t end = text.find_first_of(", \n", target + std::strlen(".target "));
    return target != std::string::npos && end != std::string::npos && text[end - 1] == 'a';
}

struct Replacement {
    int number = 0;  // 0: none
    std::string text, instead, kernel;

    std::string apply(std::string_view text_of_module) const {
        std::string ptx(text_of_module);
        if (number == 0 || ptx.find(kernel) == std::string::npos) return ptx;
        size_t at = ptx.find(text);
        if (at == std::string::npos) throw Fault("arguments", "the text to be replaced is not in the PTX: " + text);
        for (; at != std::string::npos; at = ptx.find(text, at + instead.size())) ptx.replace(at, text.size(), instead);
        return ptx;
    }
};

std::mutex mutex;
Replacement replacement;
int num_replacements = 0;

Replacement current_replacement() {
    const std::lock_guard lock(mutex);
    return replacement;
}

// A cache of modules. A decoded module takes seven times the memory of its text, which would add up to a gigabyte in a
// process that runs every kernel of a library. It keeps the modules that were used last, and all modules with
// variables, which have state.
class RecentModules {
  public:
    std::shared_ptr<LoadedModule> find_or_load(const FatBinary* owner, const PtxText* text) {
        const std::lock_guard lock(mutex_);
        const Replacement replacement = current_replacement();
        const auto found = std::find_if(modules_.begin(), modules_.end(), [&](const Entry& entry) {
            return entry.text == text && entry.replacement == replacement.number;
        });
        if (found != modules_.end()) {
            modules_.splice(modules_.begin(), modules_, found);
        } else {
            const auto loaded = std::make_shared<LoadedModule>(replacement.apply(text->text));
            modules_.push_front({owner, text, replacement.number, loaded});
            forget_oldest();
        }
        return modules_.front().loaded;
    }

    void forget(const FatBinary* owner) {
        const std::lock_guard lock(mutex_);
        modules_.remove_if([&](const Entry& entry) { return entry.owner == owner; });
    }

  private:
    struct Entry {
        const FatBinary* owner;
        const PtxText* text;
        int replacement;
        std::shared_ptr<LoadedModule> loaded;
    };

    void forget_oldest() {
        constexpr size_t kMostBytes = size_t{6} << 20;  // of text
        size_t bytes = 0;
        modules_.remove_if([&](const Entry& entry) {
            bytes += entry.text->text.size();
            return bytes > kMostBytes && entry.loaded->allocations().empty() && &entry != &modules_.front();
        });
    }

    std::mutex mutex_;
    std::list<Entry> modules_;  // the most recently used first
};

// Never destroyed, like the registry.
RecentModules& recent_modules() {
    static RecentModules* const recent = new RecentModules;
    return *recent;
}

}  // namespace

void replace_in_ptx(const std::string& text, const std::string& instead, const std::string& kernel) {
    const std::lock_guard lock(mutex);
    replacement = {text.empty() ? 0 : ++num_replacements, text, instead, kernel};
}

std::vector<PtxText> read_fat_binary(const void* wrapper) {
    const auto& outer = *static_cast<const __fatBinC_Wrapper_t*>(wrapper);
    const auto* data = reinterpret_cast<const std::byte*>(outer.data);
    ContainerHeader container;
    std::memcpy(&container, data, sizeof(container));
    if (outer.magic != FATBINC_MAGIC || outer.version != FATBINC_VERSION || container.magic != kContainerMagic) {
        throw Fault("arguments", "device code in a container that is not known; relocatable device code is none");
    }
    std::vector<PtxText> texts;
    const std::byte* end = data + container.header_bytes + container.bytes;
    for (const std::byte* at = data + container.header_bytes; at < end;) {
        EntryHeader entry;
        std::memcpy(&entry, at, sizeof(entry));
        if (entry.kind == kPtx) {
            if ((entry.flags & kCompressedFlags) != 0 || entry.compressed_bytes != 0) {
                throw Fault("arguments", "the PTX is compressed: compile it with nvcc's option --no-compress");
            }
            const char* first = reinterpret_cast<const char*>(at + entry.header_bytes);
            const std::string_view text(first, strnlen(first, entry.bytes));
            const bool specific = is_specific(text);
            texts.push_back({static_cast<int>(entry.arch), specific, text});
        }
        at += entry.header_bytes + entry.bytes;
    }
    return texts;
}

const PtxText* choose(const std::vector<PtxText>& texts, const Device& device) {
    const int arch = 10 * device.major + device.minor;
    const PtxText* best = nullptr;
    for (const PtxText& text : texts) {
        if (text.is_specific ? text.arch != arch : text.arch > arch) continue;
        const bool is_better = best == nullptr || text.arch > best->arch ||
                               (text.arch == best->arch && text.is_specific && !best->is_specific);
        if (is_better) best = &text;
    }
    return best;
}

std::shared_ptr<LoadedModule> FatBinary::load() {
    {
        const std::lock_guard lock(mutex_);
        if (!is_read_) {
            texts_ = read_fat_binary(wrapper_);
            is_read_ = true;
        }
    }
    const PtxText* text = choose(texts_, device());
    return text == nullptr ? nullptr : recent_modules().find_or_load(this, text);
}

FatBinary::~FatBinary() {
    recent_modules().forget(this);
}

}  // namespace emulator::runtime
