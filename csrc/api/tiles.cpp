// What Python asks of the native kernels' tiles, with ctypes, so that it need not repeat the numbers.

#include "attention/tiles_sm80.h"
#include "decode/split_plan.h"
#include "decode/tiles_sm80.h"
#include "host/dispatch.h"
#include "int8_matmul/tiles_sm80.h"
#include "int8_matmul/work.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>

namespace fastattn {
namespace {

template <int kHeadDim>
using BackwardPlainTile = BackwardTileSm80<kHeadDim, /*kOptions=*/false>;
template <int kHeadDim>
using BackwardOptionsTile = BackwardTileSm80<kHeadDim, /*kOptions=*/true>;

template <int kHeadDim>
using DecodeTile = DecodeTileSm80<kHeadDim, /*kInt8=*/false>;
template <int kHeadDim>
using DecodeInt8Tile = DecodeTileSm80<kHeadDim, /*kInt8=*/true>;

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

// How a launch deals its steps to CTAs, the tile's rows among them, and how many parts of tiles pass through a workspace.
struct Dealt {
    int64_t ctas, longest_steps, block_m, parts;
};

}  // namespace
}  // namespace fastattn

#define FASTATTN_ASKED_BY_PYTHON extern "C" __attribute__((visibility("default")))

// Of the matmul, its input gradient, or the matmul with int8 activations (kernel 0, 1, 2), with sums [tokens, outputs],
// each of `depth`.
FASTATTN_ASKED_BY_PYTHON fastattn::Dealt fastattn_dealt_int8_matmul(int32_t kernel, int32_t tokens, int32_t outputs,
                                                                    int32_t depth, int32_t multiprocessors) {
    using namespace fastattn;
    const auto choose = [&]<template <int> typename Tile>(auto block_ms) {
        return fastest_tile<Tile>(tokens, outputs, depth, multiprocessors, block_ms);
    };
    const auto [tile, plan] = kernel == 0   ? choose.template operator()<Int8MatmulTileSm80>(Int8MatmulBlockMs{})
                              : kernel == 1 ? choose.template operator()<Int8GradInputTileSm80>(Int8MatmulBlockMs{})
                                            : choose.template operator()<Int8MatmulS8TileSm80>(Int8MatmulS8BlockMs{});
    return {num_ctas(plan), longest_steps(plan), tile.tokens, num_places(plan)};
}

// Of decode_split_sm80, with so many rows of queries for each KV head, and sequences that fill the capacity.
FASTATTN_ASKED_BY_PYTHON fastattn::Dealt fastattn_dealt_decode(int32_t head_dim, int32_t is_int8, int32_t batch,
                                                               int32_t kv_heads, int32_t rows, int32_t capacity,
                                                               int32_t multiprocessors) {
    using namespace fastattn;
    using Tile = DecodeTile<largest(DecodeHeadDims{})>;
    const int32_t block_keys = decode_block_n(head_dim, is_int8 != 0);
    const SequenceShape shape{capacity, 0, 1, -1};
    const int32_t row_tiles = ceil_div(rows, Tile::kBlockM);
    const SplitPlan plan = split_plan(shape, batch, kv_heads, row_tiles, block_keys, /*num_splits=*/0,
                                      /*batch_invariant=*/false, multiprocessors * Tile::kMinCtasPerSm);
    const TileSpans spans = tile_spans(plan, cached_sequence(shape, capacity), block_keys);
    const int64_t blocks = int64_t{batch} * plan.tiles_per_sequence * spans.num_spans * spans.blocks_per_span;
    return {plan.num_ctas, spans_per_cta(plan, blocks), Tile::kBlockM,
            can_be_cut(plan, shape, block_keys) ? num_slots(plan) : 0};
}

// {"attention_forward_sm80": {"64": {"block_m": …}, …}, …}: attention's by head dim, the matmul's by block_m.
FASTATTN_ASKED_BY_PYTHON const char* fastattn_tiles() {
    using namespace fastattn;
    static const std::string text =
        '{' + tiles_text<ForwardTileSm80>("attention_forward_sm80", ForwardHeadDims{}) + ", " +
        tiles_text<ForwardOptionsTileSm80>("attention_forward_options_sm80", ForwardOptionsHeadDims{}) + ", " +
        tiles_text<BackwardPlainTile>("attention_backward_key_value_sm80", BackwardHeadDims{}) + ", " +
        tiles_text<BackwardOptionsTile>("attention_backward_key_value_options_sm80", BackwardHeadDims{}) + ", " +
        tiles_text<Int8MatmulTileSm80>("int8_matmul_sm80", Int8MatmulBlockMs{}) + ", " +
        tiles_text<Int8MatmulS8TileSm80>("int8_matmul_s8_sm80", Int8MatmulS8BlockMs{}) + ", " +
        tiles_text<Int8GradInputTileSm80>("int8_matmul_grad_input_sm80", Int8MatmulBlockMs{}) + ", " +
        tiles_text<DecodeTile>("decode_split_sm80", DecodeHeadDims{}) + ", " +
        tiles_text<DecodeInt8Tile>("decode_split_int8_sm80", DecodeHeadDims{}) + '}';
    return text.c_str();
}
