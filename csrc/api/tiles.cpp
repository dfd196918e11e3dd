// The tiles of the native kernels as JSON text, {"attention_forward_sm80": {"64": {"block_m": …}, …}, …}; Python reads
// it with ctypes, so that `explain` need not repeat the numbers.

#include "attention/tiles_sm80.h"

#include <string>
#include <utility>

namespace fastattn {
namespace {

template <int kHeadDim>
using BackwardPlainTile = BackwardTileSm80<kHeadDim, /*kOptions=*/false>;
template <int kHeadDim>
using BackwardOptionsTile = BackwardTileSm80<kHeadDim, /*kOptions=*/true>;

template <template <int> typename TileOf, int kHeadDim>
std::string tile_text() {
    using Tile = TileOf<kHeadDim>;
    return '"' + std::to_string(kHeadDim) + "\": {\"block_m\": " + std::to_string(Tile::kBlockM) +
           ", \"block_n\": " + std::to_string(Tile::kBlockN) + ", \"num_warps\": " + std::to_string(Tile::kNumWarps) +
           "}";
}

template <template <int> typename TileOf, int... kHeadDims>
std::string tiles_text(const std::string& kernel, std::integer_sequence<int, kHeadDims...>) {
    std::string text;
    ((text += (text.empty() ? "" : ", ") + tile_text<TileOf, kHeadDims>()), ...);
    return '"' + kernel + "\": {" + text + "}";
}

}  // namespace
}  // namespace fastattn

extern "C" __attribute__((visibility("default"))) const char* fastattn_tiles() {
    using namespace fastattn;
    static const std::string text =
        '{' + tiles_text<ForwardTileSm80>("attention_forward_sm80", ForwardHeadDims{}) + ", " +
        tiles_text<ForwardOptionsTileSm80>("attention_forward_options_sm80", ForwardOptionsHeadDims{}) + ", " +
        tiles_text<BackwardPlainTile>("attention_backward_key_value_sm80", BackwardHeadDims{}) + ", " +
        tiles_text<BackwardOptionsTile>("attention_backward_key_value_options_sm80", BackwardHeadDims{}) + '}';
    return text.c_str();
}
