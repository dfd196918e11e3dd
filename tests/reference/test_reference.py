"""Tests the oracle itself: reference.py against torch's SDPA, gradcheck, and attention in plain Python loops."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from by_hand import MASK32, attention_by_hand, normal, philox_by_hand
from fastattn import reference

# ---------------------------------------------------------------------------------------------------------------------
# Philox
# ---------------------------------------------------------------------------------------------------------------------

# Random123's known answers (kat_vectors, "philox4x32 10"): counter, key, result.
KNOWN_ANSWERS = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([MASK32] * 4, [MASK32] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS, ids=["zeros", "ones", "pi"])
def test_philox_gives_the_known_answers(counter: list[int], key: list[int], expected: list[int]) -> None:
    c0, c1, c2, c3 = (torch.tensor(word) for word in counter)
    words = reference.philox_4x32((c0, c1, c2, c3), (torch.tensor(key[0]), torch.tensor(key[1])))
    assert [int(word) for word in words] == expected
    assert philox_by_hand(counter, key) == expected


@pytest.mark.parametrize("seed", [0, 7, 2**63 - 1, -(2**63), -1])
def test_dropout_counts_columns_rows_and_heads(seed: int) -> None:
    keep = reference.dropout_keep(seed, 0.4, batch=2, heads=3, rows=2, columns=7, device=torch.device("cpu"))
    assert keep.shape == (2, 3, 2, 7)
    key = (seed & MASK32, (seed >> 32) & MASK32)
    for b, h, i, j in torch.cartesian_prod(*(torch.arange(size) for size in keep.shape)).tolist():
        word = philox_by_hand((j // 4, i, b * 3 + h, 0), key)[j % 4]
        assert bool(keep[b, h, i, j]) == (word >= int(0.4 * 2**32))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_keeps_the_right_share(p: float) -> None:
    keep = reference.dropout_keep(1, p, 4, 4, 64, 64, torch.device("cpu")).double()
    deviation = math.sqrt(p * (1 - p) / keep.numel())
    assert abs(keep.mean().item() - (1 - p)) < 5 * deviation


# ---------------------------------------------------------------------------------------------------------------------
# Dense attention
# ---------------------------------------------------------------------------------------------------------------------

TORCH_CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True, "first_row": 0},
    "gqa": {"kv_heads": 2},
    "bool mask": {"bias": "bool"},
    "float mask": {"bias": "float"},
    "scale": {"scale": 0.3},
    "negative scale": {"scale": -0.7},
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", TORCH_CASES)
def test_attention_is_torchs_sdpa(case: str, dtype: torch.dtype) -> None:
    options = dict(TORCH_CASES[case])
    kv_heads = options.pop("kv_heads", 4)
    leaves = [normal(1, 2, 4, 9, 8, dtype=dtype), normal(2, 2, kv_heads, 13, 8, dtype=dtype)]
    leaves.append(normal(3, 2, kv_heads, 13, 6, dtype=dtype))
    if options.get("bias") == "bool":
        options["bias"] = normal(4, 2, 1, 9, 13) > -0.5
    elif options.get("bias") == "float":
        leaves.append(normal(4, 1, 4, 9, 13, dtype=dtype))
        del options["bias"]
    # In 16 bits, reference.py promises torch's result in fp32 or wider, rounded once.
    wide = [leaf.to(torch.promote_types(dtype, torch.float32)).requires_grad_() for leaf in leaves]
    leaves = [leaf.requires_grad_() for leaf in leaves]

    float_bias = {"bias": leaves[3]} if len(leaves) > 3 else {}
    out, _ = reference.attention(leaves[0], leaves[1], leaves[2], **{**options, **float_bias})
    expected = F.scaled_dot_product_attention(
        wide[0],
        wide[1],
        wide[2],
        attn_mask=wide[3] if len(wide) > 3 else options.get("bias"),
        is_causal=options.get("causal", False),
        scale=options.get("scale"),
        enable_gqa=kv_heads != 4,
    )
    assert out.dtype == dtype
    torch.testing.assert_close(out, expected.to(dtype))
    grad = normal(5, *out.shape, dtype=dtype)
    actual_grads = torch.autograd.grad(out, leaves, grad)
    expected_grads = torch.autograd.grad(expected, wide, grad.to(expected.dtype))
    for actual_grad, expected_grad in zip(actual_grads, expected_grads, strict=True):
        torch.testing.assert_close(actual_grad, expected_grad.to(dtype))


def options_by_name(batch: int, heads: int, num_queries: int, num_keys: int) -> dict[str, dict[str, Any]]:
    """Returns every option of ``attention`` alone, and mixtures."""
    float_bias = normal(11, 1, heads, num_queries, num_keys)
    holes = normal(12, batch, 1, num_queries, num_keys) > 0.3
    slopes = normal(13, heads).abs()
    return {
        "none": {},
        "causal": {"causal": True},
        "causal top left": {"causal": True, "first_row": 0},
        "window": {"window": (2, 1)},
        "left window": {"window": (1, -1)},
        "right window": {"window": (-1, 0)},
        "causal overrules right": {"causal": True, "window": (3, 2)},
        "window top left": {"window": (1, 2), "first_row": 0},
        "softcap": {"softcap": 0.8},
        "float bias": {"bias": float_bias},
        "holes in a float bias": {"bias": float_bias.masked_fill(holes, -math.inf)},
        "bool bias": {"bias": ~holes},
        "column bias": {"bias": float_bias[:, :1, :1]},
        "finite minimum": {"bias": torch.zeros_like(float_bias).masked_fill(holes, torch.finfo(torch.float64).min)},
        "alibi": {"alibi_slopes": slopes},
        "alibi per batch, top left": {"alibi_slopes": normal(14, batch, heads).abs(), "first_row": 0, "causal": True},
        "sinks": {"sinks": normal(15, heads)},
        "dropout": {"dropout_p": 0.4, "dropout_seed": 2**40 + 5},
        "all dropped": {"dropout_p": 1.0, "dropout_seed": 3},
        "zero scale": {"scale": 0.0},
        "softcap, window, alibi, sinks, dropout": {
            "softcap": 1.5,
            "window": (2, 0),
            "alibi_slopes": slopes,
            "sinks": normal(15, heads),
            "dropout_p": 0.3,
            "dropout_seed": -9,
            "scale": 0.9,
        },
        "softcap, bias, sinks, causal": {
            "softcap": 1.0,
            "bias": float_bias,
            "sinks": normal(15, heads),
            "causal": True,
        },
    }


OPTION_NAMES = tuple(options_by_name(1, 1, 1, 1))


@pytest.mark.parametrize("lengths", [(3, 5), (5, 3), (1, 4)], ids=str)
@pytest.mark.parametrize("name", OPTION_NAMES)
def test_attention_is_the_plain_loop(name: str, lengths: tuple[int, int]) -> None:
    num_queries, num_keys = lengths
    options = options_by_name(2, 4, num_queries, num_keys)[name]
    tensors = normal(1, 2, 4, num_queries, 3), normal(2, 2, 2, num_keys, 3), normal(3, 2, 2, num_keys, 2)
    out, lse = reference.attention(*tensors, **options)
    expected_out, expected_lse = attention_by_hand(*tensors, **options)
    torch.testing.assert_close(out, expected_out)
    torch.testing.assert_close(lse, expected_lse)


@pytest.mark.parametrize("name", OPTION_NAMES)
def test_gradients_of_attention(name: str) -> None:
    options = options_by_name(1, 2, 3, 4)[name]
    leaves = {
        "query": normal(1, 1, 2, 3, 2, grad=True),
        "key": normal(2, 1, 1, 4, 2, grad=True),
        "value": normal(3, 1, 1, 4, 2, grad=True),
    }
    for optional in ("bias", "alibi_slopes", "sinks"):
        tensor = options.get(optional)
        if tensor is not None and tensor.dtype.is_floating_point and bool((tensor.abs() < 1e300).all()):
            leaves[optional] = tensor.clone().requires_grad_()

    def attend(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = reference.attention(**{**options, **dict(zip(leaves, tensors, strict=True))})
        return out, lse.masked_fill(lse == -math.inf, 0.0)

    assert torch.autograd.gradcheck(attend, tuple(leaves.values()))


@pytest.mark.parametrize(
    ("options", "empty_row_lse"),
    [
        ({"bias": torch.tensor([False, True, True]).view(1, 1, 3, 1)}, -math.inf),
        ({"bias": torch.tensor([-math.inf, 0.0, 0.0], dtype=torch.float64).view(1, 1, 3, 1)}, -math.inf),
        ({"causal": True, "key_rows": 2}, -math.inf),
        ({"causal": True, "key_rows": 2, "sinks": torch.tensor([0.25, 0.25], dtype=torch.float64)}, 0.25),
    ],
    ids=["bool mask", "float mask", "causal", "sink"],
)
def test_a_row_without_keys_gives_zero(options: dict[str, Any], empty_row_lse: float) -> None:
    options = dict(options)
    key_rows = options.pop("key_rows", 3)
    query, key = normal(1, 1, 2, 3, 4, grad=True), normal(2, 1, 2, key_rows, 4, grad=True)
    value = normal(3, 1, 2, key_rows, 4, grad=True)
    out, lse = reference.attention(query, key, value, **options)
    assert bool((out[:, :, 0] == 0).all())
    assert bool((lse[:, :, 0] == empty_row_lse).all())
    assert bool(lse[:, :, 1:].isfinite().all())
    query_grad, key_grad, value_grad = torch.autograd.grad(out.sum(), (query, key, value))
    assert bool((query_grad[:, :, 0] == 0).all())
    assert bool(query_grad[:, :, 1:].any())
    for grad in (query_grad, key_grad, value_grad):
        assert bool(grad.isfinite().all())


def causal_as(mask: str, num_queries: int) -> dict[str, Any]:
    """Returns options that hide key ``j`` of six from each query ``i < j``."""
    visible = torch.ones(1, 1, num_queries, 6).tril() > 0
    if mask == "causal":
        return {"causal": True, "first_row": 0}
    return {"bias": visible if mask == "bool mask" else (~visible).double().masked_fill(~visible, -math.inf)}


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e300], ids=str)
@pytest.mark.parametrize("mask", ["causal", "bool mask", "float mask"])
@pytest.mark.parametrize("num_queries", [4, 6], ids=["seen by nobody", "seen by other rows"])
def test_what_stands_in_masked_keys_has_no_influence(num_queries: int, mask: str, poison: float) -> None:
    """The last two of six keys are poisoned. The first four queries do not see them, later queries do."""
    tensors = normal(1, 1, 2, num_queries, 4), normal(2, 1, 2, 6, 4), normal(3, 1, 2, 6, 4)
    grad_out, grad_lse = normal(4, 1, 2, num_queries, 4), normal(5, 1, 2, num_queries)

    def run(query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        leaves = [leaf.clone().requires_grad_() for leaf in (query, key, value)]
        out, lse = reference.attention(*leaves, **causal_as(mask, num_queries), softcap=2.0)
        query_grad, *other_grads = torch.autograd.grad((out, lse), leaves, [grad_out, grad_lse])
        # Keys that a poisoned row sees get its gradient, so only the first rows' results are compared then.
        of_the_first_rows = [tensor[:, :, :4] for tensor in (out, lse, query_grad)]
        return of_the_first_rows + (other_grads if num_queries == 4 else [])

    query, key, value = tensors
    bad_key, bad_value = key.clone(), value.clone()
    bad_key[:, :, 4:], bad_value[:, :, 4:] = poison, poison
    for actual, expected in zip(run(query, bad_key, bad_value), run(query, key, value), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("where", ["key", "value"])
def test_a_visible_nan_is_seen_as_without_a_mask(where: str) -> None:
    """A mask that hides nothing changes nothing: NaN reaches the same outputs and gradients (except its own row's)."""
    tensors = {"query": normal(1, 1, 1, 3, 4), "key": normal(2, 1, 1, 3, 4), "value": normal(3, 1, 1, 3, 4)}
    tensors[where][0, 0, 1, 2] = math.nan

    def run(**options: Any) -> list[Tensor]:
        leaves: dict[str, Any] = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}
        out, lse = reference.attention(**leaves, **options)
        grads = torch.autograd.grad((out, lse), list(leaves.values()), [normal(4, 1, 1, 3, 4), normal(5, 1, 1, 3)])
        for name, grad in zip(leaves, grads, strict=True):
            if name == where:
                grad[0, 0, 1] = 0.0
        return [out, lse, *grads]

    unmasked = run()
    assert bool(unmasked[0].isnan().any())
    for actual, expected in zip(run(bias=torch.ones(1, 1, 3, 3) > 0), unmasked, strict=True):
        torch.testing.assert_close(actual, expected, equal_nan=True)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("batch", "heads", "num_queries", "num_keys"),
    [(0, 2, 3, 3), (2, 0, 3, 3), (2, 2, 0, 3), (2, 2, 3, 0), (2, 2, 0, 0), (0, 0, 0, 0)],
)
def test_empty_shapes(batch: int, heads: int, num_queries: int, num_keys: int, causal: bool) -> None:
    query = normal(1, batch, heads, num_queries, 4, grad=True)
    key, value = normal(2, batch, heads, num_keys, 4, grad=True), normal(3, batch, heads, num_keys, 5, grad=True)
    out, lse = reference.attention(query, key, value, causal=causal)
    assert out.shape == (batch, heads, num_queries, 5)
    assert bool((out == 0).all())
    assert bool((lse == -math.inf).all())
    for leaf, grad in zip((query, key, value), torch.autograd.grad(out.sum(), (query, key, value)), strict=True):
        assert grad.shape == leaf.shape
        assert not bool(grad.any())


@pytest.mark.parametrize("name", ["none", "bool bias", "softcap, window, alibi, sinks, dropout"])
def test_attention_compiles(name: str) -> None:
    options = options_by_name(2, 4, 3, 5)[name]
    tensors = normal(1, 2, 4, 3, 4), normal(2, 2, 2, 5, 4), normal(3, 2, 2, 5, 4)
    compiled = torch.compile(reference.attention, fullgraph=True, backend="aot_eager")
    for actual, expected in zip(compiled(*tensors, **options), reference.attention(*tensors, **options), strict=True):
        torch.testing.assert_close(actual, expected)


def test_compute_dtype_rounds_every_intermediate() -> None:
    tensors = [normal(seed, 1, 2, 16, 32, dtype=torch.bfloat16) for seed in (1, 2, 3)]
    exact = reference.attention(*(tensor.double() for tensor in tensors))[0]
    errors = [
        (reference.attention(*tensors, compute_dtype=dtype)[0].double() - exact).abs().mean().item()
        for dtype in (torch.bfloat16, torch.float32)
    ]
    assert errors[0] > 1.5 * errors[1] > 0


# ---------------------------------------------------------------------------------------------------------------------
# Packed sequences
# ---------------------------------------------------------------------------------------------------------------------

LENGTHS_Q, LENGTHS_K = (3, 0, 1, 4), (2, 5, 0, 4)


def offsets(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([sum(lengths[:end]) for end in range(len(lengths) + 1)], dtype=torch.int32)


def varlen_tensors(grad: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    total_q, total_k = sum(LENGTHS_Q), sum(LENGTHS_K)
    return normal(1, total_q, 4, 2, grad=grad), normal(2, total_k, 2, 2, grad=grad), normal(3, total_k, 2, 3, grad=grad)


VARLEN_NAMES = [
    name for name in OPTION_NAMES if "bias" not in name and "top left" not in name and name != "finite minimum"
]


@pytest.mark.parametrize("name", [*VARLEN_NAMES, "alibi per batch"])
def test_varlen_is_the_plain_loop(name: str) -> None:
    options = options_by_name(4, 4, 1, 1).get(name, {"alibi_slopes": normal(14, 4, 4).abs()})
    query, key, value = varlen_tensors()
    cu_q, cu_k = offsets(LENGTHS_Q), offsets(LENGTHS_K)
    out, lse = reference.attention_varlen(query, key, value, cu_q, cu_k, max(LENGTHS_Q), max(LENGTHS_K), **options)
    assert out.shape == (sum(LENGTHS_Q), 4, 3)
    assert lse.shape == (4, sum(LENGTHS_Q))
    for b in range(4):
        rows, columns = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        own = dict(options)
        if "alibi_slopes" in own:
            own["alibi_slopes"] = own["alibi_slopes"].expand(4, 4)[b : b + 1]
        sequence = (packed.transpose(0, 1)[None] for packed in (query[rows], key[columns], value[columns]))
        expected_out, expected_lse = attention_by_hand(*sequence, **own, first_head=4 * b)
        torch.testing.assert_close(out[rows].transpose(0, 1), expected_out[0])
        torch.testing.assert_close(lse[:, rows], expected_lse[0])


def test_gradients_of_varlen() -> None:
    cu_q, cu_k = offsets(LENGTHS_Q), offsets(LENGTHS_K)

    def attend(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
        return reference.attention_varlen(query, key, value, cu_q, cu_k, 4, 5, causal=True, sinks=sinks, softcap=1.0)

    assert torch.autograd.gradcheck(attend, (*varlen_tensors(grad=True), normal(4, 4, grad=True)))


@pytest.mark.parametrize(
    ("cu", "max_seqlen", "owners"),
    [
        ([0, 3, 5], 4, [0, 0, 0, 1, 1, None]),
        ([2, 4, 99], 4, [None, None, 0, 0, 1, 1]),
        ([-7, 2, 6], 9, [0, 0, 1, 1, 1, 1]),
        ([0, 4, 3], 4, [0, 0, 0, 0, None, None]),
        ([0, 3, 6], 2, [0, 0, None, 1, 1, None]),
        ([0], 0, [None] * 6),
    ],
    ids=["rows behind the last", "too large", "negative", "decreasing", "longer than the maximum", "no sequences"],
)
def test_varlen_takes_what_is_out_of_range_as_absent(cu: list[int], max_seqlen: int, owners: list[int | None]) -> None:
    query, key, value = normal(1, 6, 1, 2), normal(2, 6, 1, 2), normal(3, 6, 1, 2)
    bounds = torch.tensor(cu, dtype=torch.int32)
    out, lse = reference.attention_varlen(query, key, value, bounds, bounds, max_seqlen, max_seqlen)
    for row, owner in enumerate(owners):
        if owner is None:
            assert not bool(out[row].any())
            assert lse[0, row] == -math.inf
        else:
            mates = [other for other, its_owner in enumerate(owners) if its_owner == owner]
            expected, _ = reference.attention(*(x[None, None, :, 0] for x in (query[[row]], key[mates], value[mates])))
            torch.testing.assert_close(out[row], expected[0, 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scores_of_finfo_min_share_a_row_evenly(dtype: torch.dtype) -> None:
    """finfo.min is a number, no mask. Added to it, the log of the number of keys is lost, and must not be needed."""
    query, key = torch.zeros(1, 1, 2, 4, dtype=dtype), torch.zeros(1, 1, 5, 4, dtype=dtype)
    value = torch.arange(20, dtype=dtype).view(1, 1, 5, 4)
    bias = torch.full((1, 1, 2, 5), torch.finfo(torch.float32).min, dtype=dtype)
    out, _ = reference.attention(query, key, value, bias=bias)
    torch.testing.assert_close(out, value.mean(2, keepdim=True).expand(1, 1, 2, 4))


def test_the_lse_of_scores_of_finfo_min_sends_each_its_share() -> None:
    """The keys of a row together get 1 of its lse's gradient, even where the lse has lost the log of their number."""
    query, key, value = (torch.randn(1, 1, n, 8, dtype=torch.float64) for n in (2, 5, 5))
    bias = torch.full((1, 1, 2, 5), torch.finfo(torch.float32).min, dtype=torch.float64, requires_grad=True)
    _, lse = reference.attention(query, key, value, bias=bias)
    (gradient,) = torch.autograd.grad(lse.sum(), bias)
    torch.testing.assert_close(gradient, torch.full_like(gradient, 0.2))
