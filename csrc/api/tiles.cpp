// The tiles of the native kernels as JSON text, {"attention_forward_sm80": {"64": {"block_m": …}, …}, …}; Python reads
// it with ctypes, so that `explain` need not repeat the numbers. Attention's are by head dim, the matmul's by block_m.

#include "attention/tiles_sm80.h"
#include "decode/tiles_sm80.h"
#include "int8_matmul/tiles_sm80.h"

#include <string>
#include <utility>

namespace fastattn {
namespace {

template <int kHeadDim>
using BackwardPlainTile = BackwardTileSm80<kHeadDim, /*kOptions=*/false>;
template <int kHeadDim>
using BackwardOptionsTile = BackwardTileSm80<kHeadDim, /*kOptions=*/true>;

template <template <int> typename TileOf, int kKey>
std::string tile_text() {
    using Tile = TileOf<kKey>;
    std::string depth;
    if constexpr (requires { Tile::kBlockK; }) depth = ", \"block_k\": " + std::to_string(Tile::kBlockK);
    return '"' + std::to_string(kKey) + "\": {\"block_m\": " + std::to_string(Tile::kBlockM) +
           ", \"block_n\": " + std::to_string(Tile::kBlockN) + depth +
           ", \"num_warps\": " + std::to_string(Tile::kNumWarps) + "}";
}

template <template <int> typename TileOf, int... kKeys>
std::string tiles_text(const std::string& kernel, std::integer_sequence<int, kKeys...>) {
    std::string text;
    ((text += (text.empty() ? "" : ", ") + tile_text<TileOf, kKeys>()), ...);
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
        tiles_text<BackwardOptionsTile>("attention_backward_key_value_options_sm80", BackwardHeadDims{}) + ", " +
        tiles_text<Int8MatmulTileSm80>("int8_matmul_sm80", Int8MatmulBlockMs{}) + ", " +
        tiles_text<Int8GradInputTileSm80>("int8_matmul_grad_input_sm80", Int8MatmulBlockMs{}) + ", " +
        tiles_text<DecodeTileSm80>("decode_split_sm80", DecodeHeadDims{}) + '}';
    return text.c_str();
}
