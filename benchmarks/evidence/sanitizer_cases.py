"""Launches every kernel of both backends on small shapes, for the GPU check to run under compute-sanitizer.

Lengths are not multiples of the tiles, and heads are grouped. Tensors are made on the CPU, so that few kernels
other than fastattn's run. Prints each case that ran, or why a backend does not support it. ``--backend`` and ``--case``
select backends and cases.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import fastattn
from fastattn import native
from fastattn.activations import result_columns
from fastattn.call import AttentionCall
from fastattn.dispatch.device import kernel_facts
from fastattn.dispatch.support import KERNEL_BACKENDS
from fastattn.distributed.merge import merge_attention, merge_into
from fastattn.functional.attention_block import BackwardTensors, add_gradients_of_block, attention_block

DTYPE = torch.bfloat16
Case = Callable[[torch.device], None]


def random(device: torch.device, *shape: int, dtype: torch.dtype = DTYPE, seed: int = 0) -> Tensor:
    """Returns normally distributed numbers, drawn on the CPU from ``seed``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(device)


def query_key_value(device: torch.device, head_dim: int, dtype: torch.dtype = DTYPE) -> list[Tensor]:
    """Returns query ``[1, 2, 70, D]``, key and value ``[1, 1, 150, D]``, whose last tiles are only partly filled."""
    shapes = (1, 2, 70, head_dim), (1, 1, 150, head_dim), (1, 1, 150, head_dim)
    return [random(device, *shape, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes)]


def differentiate(out: Any, gradients: bool = True) -> None:
    """Runs the backward pass from a random gradient of ``out``, if ``gradients``."""
    if gradients:
        out.backward(random(out.device, *out.shape, seed=9))


def forward(device: torch.device, head_dim: int, causal: bool, dtype: torch.dtype = DTYPE) -> None:
    fastattn.attention(*query_key_value(device, head_dim, dtype), causal=causal)


def shared_keys(device: torch.device) -> None:
    """Runs the forward pass with two query heads per KV head and at least as many work tiles as SMs.

    The kernel for Hopper then runs in clusters of two CTAs, which load each tile of keys once for both.
    """
    batch = -(-kernel_facts(device).num_sms // 2)
    query, key, value = query_key_value(device, 128)
    fastattn.attention(*(tensor.repeat(batch, 1, 1, 1) for tensor in (query, key, value)))


def split_keys(device: torch.device) -> None:
    """Runs forward over one tile of query rows: the CTAs split the keys, and the last one combines the partials."""
    shapes = (1, 1, 30, 64), (1, 1, 4000, 64), (1, 1, 4000, 64)
    fastattn.attention(*(random(device, *shape, seed=seed) for seed, shape in enumerate(shapes)), causal=True)


def backward(device: torch.device, head_dim: int, causal: bool, deterministic: bool = False) -> None:
    leaves = [tensor.requires_grad_() for tensor in query_key_value(device, head_dim)]
    differentiate(fastattn.attention(*leaves, causal=causal, deterministic=deterministic))


def block(device: torch.device, head_dim: int, window: tuple[int, int]) -> None:
    """Runs a block of a larger call: its output is float32, and its gradients are added to existing sums."""
    query, key, value = query_key_value(device, head_dim)
    call = AttentionCall(query, key, value, window=window, first_row=200, first_key=180)
    out, lse = attention_block(call)
    sums = [torch.zeros(tensor.shape).to(device) for tensor in (query, key, value)]
    grad_out, grad_lse = random(device, *out.shape, seed=9), random(device, *lse.shape, dtype=torch.float32, seed=8)
    tensors = BackwardTensors(grad_out, grad_lse, query, key, value, out.to(DTYPE), lse)
    add_gradients_of_block((sums[0], sums[1], sums[2]), None, tensors, call)


def every_option(device: torch.device, gradients: bool, head_dim: int = 64) -> None:
    """Combines bias, window, softcap, dropout and sinks; ``gradients`` adds backward, also for the bias and sinks."""
    leaves = [tensor.requires_grad_(gradients) for tensor in query_key_value(device, head_dim)]
    bias = random(device, 1, 2, 70, 150).requires_grad_(gradients)
    sinks = random(device, 2).requires_grad_(gradients)
    out = fastattn.attention(
        *leaves, bias=bias, window=(40, 3), softcap=20.0, dropout_p=0.2, dropout_seed=5, sinks=sinks
    )
    differentiate(out, gradients)


def smallest_bias(device: torch.device) -> None:
    """Sets every score to finfo.min by the bias, so that the backward pass computes row maxima and sums again."""
    query, key, value = (tensor.requires_grad_() for tensor in query_key_value(device, 64))
    bias = torch.full((1, 1, 70, 150), torch.finfo(DTYPE).min, dtype=DTYPE).to(device)
    differentiate(fastattn.attention(query, key, value, bias=bias))


def packed(device: torch.device, gradients: bool) -> None:
    """Packs three sequences, one of them empty, with ALiBi; ``gradients`` adds the backward pass, for slopes too."""
    offsets = torch.tensor([0, 33, 33, 100], dtype=torch.int32).to(device)
    query, key, value = (random(device, 100, heads, 64, seed=heads).requires_grad_(gradients) for heads in (4, 2, 2))
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625]).to(device).requires_grad_(gradients)
    out = fastattn.attention_varlen(query, key, value, offsets, offsets, 67, 67, causal=True, alibi_slopes=slopes)
    differentiate(out, gradients)


def ranges(device: torch.device, gradients: bool) -> None:
    """Attends over ranges of keys that differ between heads; ``gradients`` adds the backward pass."""
    leaves = [tensor.requires_grad_(gradients) for tensor in query_key_value(device, 64)]
    of_heads = [fastattn.masks.window_and_global(150, (left, 0), 10)[:, :, -70:] for left in (40, 5)]
    differentiate(fastattn.attention(*leaves, key_ranges=torch.cat(of_heads, dim=1).to(device)), gradients)


def step(device: torch.device, caches: Iterable[Tensor], lengths: tuple[int, int], tokens: int, **options: Any) -> None:
    """Appends new tokens to each of two sequences in ``caches`` and attends to them, in 3 splits by default."""
    k_cache, v_cache = caches
    k_new, v_new = (random(device, 2, 2, tokens, 64, seed=seed) for seed in (3, 4))
    options = {"k_new": k_new, "v_new": v_new, "num_splits": 3, **options}
    fastattn.attention_with_kv_cache(
        random(device, 2, 8, tokens, 64),
        k_cache,
        v_cache,
        torch.tensor(lengths, dtype=torch.int32).to(device),
        **options,
    )


def contiguous_caches(device: torch.device) -> list[Tensor]:
    return [random(device, 2, 2, 256, 64, seed=seed) for seed in (1, 2)]


def decode(device: torch.device, num_splits: int) -> None:
    """Appends to a contiguous cache with RoPE and attends to it in ``num_splits`` splits."""
    cos, sin = (random(device, 256, 32, seed=seed) for seed in (5, 6))
    step(device, contiguous_caches(device), (190, 7), 1, rotary_cos=cos, rotary_sin=sin, num_splits=num_splits)


def decode_paged_int8(device: torch.device) -> None:
    """Attends to int8 pages in arbitrary order; unused entries of the block table are not page numbers."""
    table = torch.tensor([[5, 0, 3, 2], [1, 4, 2**30, -1]], dtype=torch.int32).to(device)
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(-127, 128, (2, 6, 2, 64, 64), generator=generator, dtype=torch.int8)
    pages = (of.to(device) for of in numbers)  # two allocations, so that memcheck finds accesses beyond either
    k_scale, v_scale = (torch.full((6, 2, 64), 0.01).to(device) for _ in "kv")
    step(device, pages, (250, 100), 2, block_table=table, k_scale=k_scale, v_scale=v_scale)


def decode_tree(device: torch.device) -> None:
    """Attends with a tree of five proposed tokens: a tile has 20 rows, five for each query head of a KV head."""
    tree = torch.eye(5, dtype=torch.bool)
    tree[:, 0] = True
    step(device, contiguous_caches(device), (190, 7), 5, tree_mask=tree[None].to(device))


def decode_fp8(device: torch.device) -> None:
    """Attends to an fp8 cache with a scale per head. The two new values are NaN; the first query sees one of them."""
    caches = (cache.to(torch.float8_e4m3fn) for cache in contiguous_caches(device))
    v_new = random(device, 2, 2, 2, 64, seed=4) * float("nan")
    step(device, caches, (200, 100), 2, v_new=v_new, k_scale=torch.tensor([0.5, 2.0]).to(device))


def append(device: torch.device, dtype: torch.dtype) -> None:
    """Appends tokens to slots in arbitrary order, among them padding (-1) and a slot that does not exist."""
    slots = torch.tensor([40, -1, 3, 64, 17, 0, 2**40]).to(device)
    k_pages, v_pages = (torch.zeros(4, 2, 16, dim, dtype=dtype).to(device) for dim in (64, 80))
    scales = {name: torch.ones(4, 2, 16).to(device) for name in ("k_scale", "v_scale") if dtype != DTYPE}
    k_new, v_new = (random(device, 7, 2, dim, seed=dim) for dim in (64, 80))
    fastattn.append_to_cache(k_new, v_new, k_pages, v_pages, slots, **scales)


def prompts_in_pages(device: torch.device, page_size: int) -> None:
    """Processes two prompts, in two chunks each, over the pages of one cache.

    The forward kernel for Hopper copies pages of 16 rows with TMA, and gathers the rows of pages of 5 one by one.
    """
    cache = fastattn.PagedKVCache(1, 192 // page_size, 2, 64, page_size=page_size, dtype=DTYPE, device=device)
    sequences = [cache.add(), cache.add()]
    for lengths in ((70, 5), (20, 33)):
        query, key, value = (random(device, sum(lengths), heads, 64, seed=heads) for heads in (4, 2, 2))
        cache.chunk(sequences, lengths).attend(0, query, key, value)


def prompt_in_8_bits(device: torch.device, dtype: torch.dtype) -> None:
    """Attends to an 8-bit cache; for the longer prompt, its numbers are first converted to 16-bit floats."""
    cache = fastattn.KVCache(1, 2, 2, 64, capacity=128, dtype=DTYPE, device=device, quantized=dtype)
    for length in (5, 80):
        query, key, value = (random(device, 2, heads, length, 64, seed=heads) for heads in (8, 2, 2))
        cache.attend(0, query, key, value)


def merge(device: torch.device) -> None:
    """Merges two blocks, one of them in float32, with gradients, and then merges them again in place."""
    out_a, out_b = random(device, 1, 2, 70, 72, dtype=torch.float32), random(device, 1, 2, 70, 72, seed=1)
    lse_a, lse_b = (random(device, 1, 2, 70, dtype=torch.float32, seed=seed) for seed in (2, 3))
    leaves = [tensor.requires_grad_() for tensor in (out_a, lse_a, out_b, lse_b)]
    out, lse = merge_attention(*leaves)
    torch.autograd.grad((out, lse), leaves, (random(device, *out.shape, seed=4).float(), torch.ones_like(lse)))
    merge_into(out.detach(), lse.detach(), out_b.detach(), lse_b.detach())


def int8(device: torch.device, rows: int, granularity: str | int, **options: Any) -> None:
    """Runs int8_linear and its input gradient. With one row, the kernel splits K and combines the partials."""
    weight = fastattn.quantize_int8(random(torch.device("cpu"), 96, 1024), granularity).to(device)
    x = random(device, rows, 1024).requires_grad_()
    columns = result_columns(options.get("activation"), 96)
    bias, options["residual"] = random(device, 96, seed=1), random(device, rows, columns, seed=2)
    fastattn.int8_linear(x, weight, bias, **options).backward(random(device, rows, columns, seed=3))
    with torch.no_grad():  # only without gradients does the kernel compute the activation
        fastattn.int8_linear(x, weight, bias, **options)


def int8_dequantised(device: torch.device) -> None:
    """Dequantises the weight for cuBLAS. 96 and 1000 are not multiples of the block that a CTA dequantises."""
    weight = fastattn.quantize_int8(random(torch.device("cpu"), 96, 1000)).to(device)
    with native.forced_int8_tile(-1):
        fastattn.int8_linear(random(device, 5, 1000).requires_grad_(), weight).backward(random(device, 5, 96, seed=3))


def int8_in_clusters(device: torch.device, granularity: str | int, **options: Any) -> None:
    """Runs the kernels for sm_90 on Hopper, elsewhere the library's choice. 130 rows do not fill the last tile."""
    with native.forced_int8_tile(90 if kernel_facts(device).arch == 90 else 0):
        int8(device, rows=130, granularity=granularity, activation="gelu", **options)


CASES: dict[str, Case] = {
    **{
        f"forward d={dim} {'causal' if causal else 'full'}": partial(forward, head_dim=dim, causal=causal)
        for dim in (64, 128)
        for causal in (False, True)
    },
    "forward float16": partial(forward, head_dim=64, causal=True, dtype=torch.float16),
    "forward d=256": partial(forward, head_dim=256, causal=True),
    "forward with shared keys": shared_keys,
    "forward with split keys": split_keys,
    "backward d=64": partial(backward, head_dim=64, causal=True),
    "backward d=128 deterministic": partial(backward, head_dim=128, causal=False, deterministic=True),
    "backward d=256": partial(backward, head_dim=256, causal=True),
    "backward, finfo.min": smallest_bias,
    "forward and backward of a block": partial(block, head_dim=128, window=(-1, -1)),
    "forward and backward of a block with a window": partial(block, head_dim=64, window=(40, 30)),
    "every option": partial(every_option, gradients=False),
    "every option, gradients": partial(every_option, gradients=True),
    **{f"every option, gradients, d={dim}": partial(every_option, gradients=True, head_dim=dim) for dim in (128, 256)},
    "forward over ranges of keys": partial(ranges, gradients=False),
    "ranges of keys, gradients": partial(ranges, gradients=True),
    "packed": partial(packed, gradients=False),
    "packed, gradients": partial(packed, gradients=True),
    "prompts in pages of 16": partial(prompts_in_pages, page_size=16),
    "prompts in pages of 5": partial(prompts_in_pages, page_size=5),
    "decode in one split": partial(decode, num_splits=1),
    "decode in 3 splits": partial(decode, num_splits=3),
    "decode paged int8": decode_paged_int8,
    "decode fp8": decode_fp8,
    "decode a tree": decode_tree,
    "append": partial(append, dtype=DTYPE),
    "append int8": partial(append, dtype=torch.int8),
    "append fp8": partial(append, dtype=torch.float8_e4m3fn),
    "prompt int8": partial(prompt_in_8_bits, dtype=torch.int8),
    "prompt fp8": partial(prompt_in_8_bits, dtype=torch.float8_e4m3fn),
    "merge": merge,
    "int8 one row": partial(int8, rows=1, granularity="channel"),
    "int8 40 rows in groups": partial(int8, rows=40, granularity=128, activation="gelu"),
    "int8 one row, SwiGLU": partial(int8, rows=1, granularity="channel", activation="swiglu"),
    "int8 130 rows": partial(int8, rows=130, granularity="channel", activation="silu"),
    "int8 dequantised": int8_dequantised,
    "int8 in clusters": partial(int8_in_clusters, granularity="channel"),
    "int8 in clusters, groups": partial(int8_in_clusters, granularity=64),
    "int8 activations in groups": partial(int8, rows=20, granularity=32, input_precision="int8"),
    "int8 activations, 520 rows": partial(int8, rows=520, granularity="channel", input_precision="int8"),
    "int8 activations in clusters": partial(int8_in_clusters, granularity="channel", input_precision="int8"),
}


def run(backend: str, name: str, device: torch.device) -> bool:
    """Runs the case and returns whether the backend supports it."""
    try:
        with fastattn.use_backend(backend):
            CASES[name](device)
    except fastattn.InputError as error:
        print(f"{backend}, {name}: not taken: {str(error).splitlines()[0]}", flush=True)
        return False
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    print(f"{backend}, {name}: ran", flush=True)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=KERNEL_BACKENDS, action="append", help="by default both")
    parser.add_argument("--case", choices=CASES, action="append", help="by default all")
    options = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device())
    ran = [
        run(backend, name, device) for backend in options.backend or KERNEL_BACKENDS for name in options.case or CASES
    ]
    if not any(ran):
        raise SystemExit("no case ran")


if __name__ == "__main__":
    main()
