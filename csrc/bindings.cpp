// Defines the schemas of all operations, and registers the native kernels that implement them. Does nothing else.
//
// The meaning of each argument is documented in python/fastattn. The Triton kernels are registered with the same
// schemas in a namespace of their own. An operation without a registration below has no native kernel: another backend
// runs it.
//
// The build passes in FASTATTN_NAMESPACE, the operators' namespace. A process may load this library twice, as the
// installed package and as a kernel repository of the Hugging Face Hub, and each copy needs its own namespace. The
// build also passes in FASTATTN_DISPATCH_KEY, the dispatch key of the tensors that the native kernels take.

#include <torch/csrc/stable/library.h>

#ifdef FASTATTN_WITH_CUDA
#include "api/append.h"
#include "api/attention_backward.h"
#include "api/attention_forward.h"
#include "api/decode.h"
#include "api/dequantize_cache.h"
#include "api/int8_matmul.h"
#endif

// Expand FASTATTN_NAMESPACE before torch's macros paste its name.
#define DEFINE_OPERATORS(name, library) STABLE_TORCH_LIBRARY(name, library)
#define DEFINE_KERNELS(name, key, library) STABLE_TORCH_LIBRARY_IMPL(name, key, library)

#define DECODE_ARGUMENTS                                                                                          \
    "Tensor query, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor cache_seqlens, Tensor? k_new, Tensor? v_new, "  \
    "Tensor? rotary_cos, Tensor? rotary_sin, bool rotary_interleaved, Tensor? block_table, Tensor(c!)? k_scale, " \
    "Tensor(d!)? v_scale, Tensor? alibi_slopes, Tensor? sinks, float scale, int window_left, int window_right, "  \
    "float softcap, int num_splits, bool batch_invariant, Tensor? tree_mask"

DEFINE_OPERATORS(FASTATTN_NAMESPACE, m) {
    m.def(
        "attention_forward(Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor? alibi_slopes, Tensor? sinks, "
        "Tensor? dropout_seed, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, "
        "float scale, int window_left, int window_right, SymInt? first_row, SymInt first_key, SymInt first_head, "
        "float softcap, float dropout_p, Tensor? block_table=None, bool batch_invariant=False, "
        "bool return_max_logit=False, bool exact_out=False, Tensor? key_ranges=None) "
        "-> (Tensor out, Tensor lse, Tensor max_logit)");

    m.def(
        "attention_backward(Tensor grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, Tensor out, "
        "Tensor lse, Tensor? bias, Tensor? alibi_slopes, Tensor? sinks, Tensor? dropout_seed, Tensor? cu_seqlens_q, "
        "Tensor? cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, float scale, int window_left, "
        "int window_right, SymInt? first_row, SymInt first_key, SymInt first_head, float softcap, float dropout_p, "
        "bool deterministic, bool bias_grad, bool slopes_grad, Tensor? key_ranges=None) "
        "-> (Tensor grad_query, Tensor grad_key, "
        "Tensor grad_value, Tensor grad_bias, Tensor grad_sinks, Tensor grad_slopes)");

    m.def(
        "attention_backward_add(Tensor(a!) grad_query, Tensor(b!) grad_key, Tensor(c!) grad_value, Tensor grad_out, "
        "Tensor? grad_lse, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, Tensor? alibi_slopes, "
        "Tensor? dropout_seed, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, "
        "float scale, int window_left, int window_right, SymInt? first_row, SymInt first_key, SymInt first_head, "
        "float softcap, float dropout_p, bool deterministic, bool slopes_grad, Tensor? key_ranges=None) "
        "-> Tensor grad_slopes");

    m.def("attention_decode(" DECODE_ARGUMENTS ") -> (Tensor out, Tensor lse)");

    m.def("attention_decode_out(" DECODE_ARGUMENTS ", Tensor(e!) out) -> Tensor lse");

    m.def(
        "append_to_cache(Tensor k_new, Tensor v_new, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping, "
        "Tensor(c!)? k_scale, Tensor(d!)? v_scale) -> ()");

    m.def(
        "dequantize_cache(Tensor k_cache, Tensor v_cache, Tensor? k_scale, Tensor? v_scale, Tensor seqlens, "
        "Tensor? block_table, Tensor(a!) k_out, Tensor(b!) v_out) -> ()");

    m.def(
        "attention_split_keys(Tensor query, Tensor key, Tensor value, Tensor? alibi_slopes, Tensor? sinks, "
        "float scale, int window_left, int window_right, float softcap) -> (Tensor out, Tensor lse)");

    m.def(
        "int8_matmul(Tensor x, Tensor weight, Tensor scale, Tensor? bias, Tensor? residual, str activation, "
        "bool int8_activations=False) -> Tensor");

    m.def(
        "int8_matmul_grad_input(Tensor grad_out, Tensor weight, Tensor scale, bool bias_grad) "
        "-> (Tensor grad_input, Tensor grad_bias)");
}

#ifdef FASTATTN_WITH_CUDA
DEFINE_KERNELS(FASTATTN_NAMESPACE, FASTATTN_DISPATCH_KEY, m) {
    m.impl("attention_forward", TORCH_BOX(&fastattn::attention_forward));
    m.impl("attention_backward", TORCH_BOX(&fastattn::attention_backward));
    m.impl("attention_backward_add", TORCH_BOX(&fastattn::attention_backward_add));
    m.impl("int8_matmul", TORCH_BOX(&fastattn::int8_matmul));
    m.impl("int8_matmul_grad_input", TORCH_BOX(&fastattn::int8_matmul_grad_input));
    m.impl("attention_decode", TORCH_BOX(&fastattn::attention_decode));
    m.impl("attention_decode_out", TORCH_BOX(&fastattn::attention_decode_out));
    m.impl("append_to_cache", TORCH_BOX(&fastattn::append_to_cache));
    m.impl("dequantize_cache", TORCH_BOX(&fastattn::dequantize_cache));
    m.impl("attention_split_keys", TORCH_BOX(&fastattn::attention_split_keys));
}
#endif
