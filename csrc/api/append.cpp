// Checks the arguments of fastattn::append_to_cache, fills the kernel's parameters and launches the kernel.

#include "api/append.h"

#include <algorithm>

#include "api/cache_arguments.h"
#include "api/checks.h"
#include "api/device.h"
#include "decode/decode.h"
#include "host/device_facts.h"

namespace fastattn {
namespace {

constexpr const char* kOp = "append_to_cache";

CacheFormat check_arguments(const Tensor& k_new, const Tensor& v_new, const Tensor& k_cache, const Tensor& v_cache,
                            const Tensor& slot_mapping) {
    check_rank(kOp, "k_new", k_new, 3);
    check_rank(kOp, "k_cache", k_cache, 4);
    check_rank(kOp, "v_cache", v_cache, 4);
    const int64_t tokens = k_new.size(0), kv_heads = k_new.size(1);
    check_shape(kOp, "v_new", v_new, {tokens, kv_heads, v_cache.size(3)});
    check_shape(kOp, "k_cache", k_cache, {k_cache.size(0), kv_heads, k_cache.size(2), k_new.size(2)});
    check_shape(kOp, "v_cache", v_cache, {k_cache.size(0), kv_heads, k_cache.size(2), v_cache.size(3)});
    check(v_new.scalar_type() == k_new.scalar_type(), kOp, "v_new must have the dtype of k_new, ", dtype_text(k_new),
          ", got ", dtype_text(v_new));
    check_device(kOp, "v_new", v_new, k_new, "k_new");
    const int32_t most_dims = decode_append_kernels(CacheFormat::k16Bit).largest_head_dim();
    check_head_dim(kOp, "k_new", k_new, most_dims);
    check_head_dim(kOp, "v_new", v_new, most_dims);
    const CacheFormat format = check_written(kOp, k_cache, v_cache, "k_new", k_new);
    check_shape(kOp, "slot_mapping", slot_mapping, {tokens});
    check(slot_mapping.scalar_type() == ScalarType::Long || slot_mapping.scalar_type() == ScalarType::Int, kOp,
          "slot_mapping must be int64 or int32, got ", dtype_text(slot_mapping));
    check_device(kOp, "slot_mapping", slot_mapping, k_new, "k_new");
    return format;
}

}  // namespace

void append_to_cache(Tensor k_new, Tensor v_new, Tensor k_cache, Tensor v_cache, Tensor slot_mapping,
                     std::optional<Tensor> k_scale, std::optional<Tensor> v_scale) {
    const CacheFormat format = check_arguments(k_new, v_new, k_cache, v_cache, slot_mapping);
    check_scales(kOp, "k_scale", k_scale, k_cache);
    check_scales(kOp, "v_scale", v_scale, v_cache);
    const DataType dtype = data_type(kOp, "k_new", k_new);
    const int64_t tokens = k_new.size(0), kv_heads = k_new.size(1);
    const int64_t num_slots = k_cache.size(0) * k_cache.size(2);
    if (tokens * kv_heads * num_slots == 0) return;

    AppendParams params{};
    const Tensor aligned_k = aligned(k_new), aligned_v = aligned(v_new);
    const Sequences in_a_row{/*are_packed=*/true, /*batch=*/1, tokens};
    params.k_new = heads_view<const uint16_t>(kOp, "k_new", aligned_k, in_a_row);
    params.v_new = heads_view<const uint16_t>(kOp, "v_new", aligned_v, in_a_row);
    params.num_rows = to_int32(kOp, "the number of rows of k_new", tokens * kv_heads);
    params.k_cache = cache_view(kOp, "k_cache", k_cache, "k_scale", k_scale);
    params.v_cache = cache_view(kOp, "v_cache", v_cache, "v_scale", v_scale);
    params.slots = {slot_mapping.data_ptr(),
                    slot_mapping.scalar_type() == ScalarType::Long,
                    slot_mapping.stride(0),
                    to_int32(kOp, "the number of slots of k_cache", num_slots),
                    to_int32(kOp, "the page size of k_cache", k_cache.size(2)),
                    Divisor::of(static_cast<int32_t>(k_cache.size(2)))};
    const OnDeviceOf device(k_new);
    const int32_t widest = std::max(params.k_new.head_dim, params.v_new.head_dim);
    decode_append_kernels(format)
        .find(device_facts().compute_capability, widest, dtype, /*flag=*/false)
        .launch(params, device.stream());
}

}  // namespace fastattn
