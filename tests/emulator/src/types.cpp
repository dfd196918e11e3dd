#include "types.h"

#include <iterator>

namespace emulator {

std::optional<Type> parse_type(std::string_view name) {
    constexpr std::string_view kNames[] = {"pred",  "b8",   "b16",  "b32",  "b64",    "u8",     "u16",
                                           "u32",   "u64",  "s8",   "s16",  "s32",    "s64",    "f16",
                                           "bf16",  "f32",  "f64",  "tf32", "f16x2",  "bf16x2", "u16x2",
                                           "s16x2", "b128", "e4m3", "e5m2", "e4m3x2", "e5m2x2"};
    for (size_t i = 0; i < std::size(kNames); ++i) {
        if (kNames[i] == name) return static_cast<Type>(i);
    }
    return std::nullopt;
}

std::optional<Space> parse_space(std::string_view name) {
    if (name == "global") return Space::kGlobal;
    if (name == "shared" || name == "shared::cta") return Space::kShared;
    if (name == "shared::cluster") return Space::kCluster;
    if (name == "local") return Space::kLocal;
    if (name == "const") return Space::kConst;
    if (name == "param" || name == "param::entry" || name == "param::func") return Space::kParam;
    return std::nullopt;
}

}  // namespace emulator
