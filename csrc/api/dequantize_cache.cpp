// Checks the arguments of fastattn::dequantize_cache, fills the kernel's parameters and launches the kernel.

#include "api/dequantize_cache.h"

#include "api/cache_arguments.h"
#include "api/checks.h"
#include "api/device.h"
#include "decode/decode.h"
#include "host/device_facts.h"

namespace fastattn {
namespace {

constexpr const char* kOp = "dequantize_cache";

void check_result(const char* name, const Tensor& out, const Tensor& cache, int64_t blocks, const Tensor& k_out) {
    check_rank(kOp, name, out, 4);
    check_shape(kOp, name, out, {blocks, cache.size(1), cache.size(2), cache.size(3)});
    check(out.scalar_type() == k_out.scalar_type(), kOp, name, " must have the dtype of k_out, ", dtype_text(k_out),
          ", got ", dtype_text(out));
    check_device(kOp, name, out, cache, "the cache");
    check(out.numel() == 0 || (out.is_contiguous() && is_aligned(out)), kOp, name,
          " is written in place: it must be contiguous, and its address a multiple of 16 bytes");
}

}  // namespace

void dequantize_cache(Tensor k_cache, Tensor v_cache, std::optional<Tensor> k_scale, std::optional<Tensor> v_scale,
                      Tensor seqlens, std::optional<Tensor> block_table, Tensor k_out, Tensor v_out) {
    check_rank(kOp, "k_cache", k_cache, 4);
    check_rank(kOp, "v_cache", v_cache, 4);
    check_shape(kOp, "v_cache", v_cache, {k_cache.size(0), k_cache.size(1), k_cache.size(2), v_cache.size(3)});
    const DataType dtype = data_type(kOp, "k_out", k_out);
    const CacheFormat format = check_written(kOp, k_cache, v_cache, "k_out", k_out);
    check(is_8bit(format), kOp, "k_cache must be int8 or float8_e4m3fn, got ", dtype_text(k_cache));
    // The dequantising kernels take any head dim. The limit is that of the kernels that fill a cache.
    const int32_t most_dims = decode_append_kernels(format).largest_head_dim();
    check_head_dim(kOp, "k_cache", k_cache, most_dims);
    check_head_dim(kOp, "v_cache", v_cache, most_dims);
    check_scales(kOp, "k_scale", k_scale, k_cache);
    check_scales(kOp, "v_scale", v_scale, v_cache);
    check_rank(kOp, "seqlens", seqlens, 1);
    const int64_t batch = seqlens.size(0), pages = block_table ? block_table->size(1) : 1;
    check_int32(kOp, "seqlens", seqlens, k_cache, "the cache");
    if (block_table) {
        check_shape(kOp, "block_table", *block_table, {batch, pages});
        check_int32(kOp, "block_table", *block_table, k_cache, "the cache");
    } else {
        check_shape(kOp, "k_cache", k_cache, {batch, k_cache.size(1), k_cache.size(2), k_cache.size(3)});
    }
    check_result("k_out", k_out, k_cache, batch * pages, k_out);
    check_result("v_out", v_out, v_cache, batch * pages, k_out);
    const int32_t capacity = checked_capacity(kOp, k_cache, block_table);
    if (k_out.numel() == 0) return;

    DequantizeCacheParams params{};
    params.k_cache = cache_view(kOp, "k_cache", k_cache, "k_scale", k_scale);
    params.v_cache = cache_view(kOp, "v_cache", v_cache, "v_scale", v_scale);
    params.layout = cache_layout(kOp, k_cache, block_table);
    const Tensor lengths = torch::stable::contiguous(seqlens);
    params.seqlens = static_cast<const int32_t*>(lengths.data_ptr());
    params.k_out = static_cast<uint16_t*>(k_out.data_ptr());
    params.v_out = static_cast<uint16_t*>(v_out.data_ptr());
    params.batch = to_int32(kOp, "seqlens", batch);
    params.kv_heads = to_int32(kOp, "k_cache", k_cache.size(1));
    params.blocks_per_sequence = to_int32(kOp, "block_table", pages);
    params.capacity = capacity;
    const OnDeviceOf device(k_cache);
    decode_dequantize_kernels(format)
        .find(device_facts().compute_capability, 0, dtype, /*flag=*/false)
        .launch(params, device.stream());
}

}  // namespace fastattn
