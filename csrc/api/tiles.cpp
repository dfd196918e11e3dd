// The tiles of the native kernels as JSON text, {"attention_forward_sm80": {"64": {"block_m": …}, …}}; Python reads it
// with ctypes, so that `explain` need not repeat the numbers.

#include "attention/tiles_sm80.h"

#include <string>
#include <utility>

namespace fastattn {
namespace {

template <int kHeadDim>
std::string tile_text() {
    using Tile = ForwardTileSm80<kHeadDim>;
    return '"' + std::to_string(kHeadDim) + "\": {\"block_m\": " + std::to_string(Tile::kBlockM) +
           ", \"block_n\": " + std::to_string(Tile::kBlockN) + ", \"num_warps\": " + std::to_string(Tile::kNumWarps) +
           "}";
}

template <int... kHeadDims>
std::string tiles_text(std::integer_sequence<int, kHeadDims...>) {
    std::string text;
    ((text += (text.empty() ? "" : ", ") + tile_text<kHeadDims>()), ...);
    return "{\"attention_forward_sm80\": {" + text + "}}";
}

}  // namespace
}  // namespace fastattn

extern "C" __attribute__((visibility("default"))) const char* fastattn_tiles() {
    static const std::string text = fastattn::tiles_text(fastattn::ForwardHeadDims{});
    return text.c_str();
}
