"""Tests tree masks of speculative decoding, of every backend: which other tokens each proposed token sees."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import decode_cases
import fastattn
from cuda_kernels import DTYPES
from decode_cases import Case, make_arguments, run_public
from fastattn import InputError, KVCache, PagedKVCache
from kernel_device import DEVICE
from turns import in_turn

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("emulated_gpu", "tracked_tensors")

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["f16", "bf16"])
FORMATS: dict[str, dict[str, Any]] = {
    "16-bit": {},
    "int8": {"int8": True},
    "fp8": {"fp8": "tokens"},
    "fp8-unscaled": {"fp8": "nobody"},
}
each_format = pytest.mark.parametrize("stored", FORMATS)


def tree(parents: list[int]) -> Tensor:
    """Returns a mask, bool ``[Sq, Sq]``: token ``i`` sees itself and its ancestors; ``parents[i]`` is -1 for roots."""
    mask = torch.eye(len(parents), dtype=torch.bool)
    for token, parent in enumerate(parents):
        if parent >= 0:
            mask[token] |= mask[parent]
    return mask


def chain(size: int) -> Tensor:
    return tree(list(range(-1, size - 1)))


def star(size: int) -> Tensor:
    return tree([-1] + [0] * (size - 1))


def drawn_parents(size: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(-1, token) for token in range(size)]


def drawn_mask(*shape: int, seed: int) -> Tensor:
    """Draws a mask that is no tree, with rows that see no token."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(*shape, generator=generator) < 0.4
    mask[..., ::3, :] = False
    return mask


def check(case: Case, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Compares a call with ``mask [B or 1, Sq, Sq]`` with the oracle."""
    arguments = make_arguments(case)
    arguments["tree_mask"] = mask.to(DEVICE)
    return decode_cases.check(case, run_public, arguments)


# --- What a tree is ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_each_path_of_a_tree_is_a_sequence_of_its_own(seed: int, backend: str) -> None:
    """A token's result is that of the last token of its path, when only its path follows the cached tokens."""
    parents, length = drawn_parents(11, seed), 37
    case = Case("paths", lengths=(length,), queries=11, new=11, heads=(4, 2), dims=(64, 64), seed=seed)
    arguments = make_arguments(case)
    mask = tree(parents).to(DEVICE)
    out, lse = run_public(case, {**decode_cases.clone(arguments), "tree_mask": mask[None]})
    for token in range(11):
        path = mask[token].nonzero().flatten()
        alone = decode_cases.clone(arguments)
        for name in ("query", "k_new", "v_new"):
            alone[name] = alone[name][:, :, path].contiguous()
        path_out, path_lse = run_public(case, alone)
        torch.testing.assert_close(out[:, :, token], path_out[:, :, -1], rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(lse[:, :, token], path_lse[:, :, -1], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@each_dtype
@each_format
def test_a_chain_is_causal(stored: str, dtype: torch.dtype, backend: str) -> None:
    case = Case(
        "chain", lengths=(0, 30, 149, 140), queries=6, new=6, capacity=160, dtype=dtype, splits=1, **FORMATS[stored]
    )
    expected = run_public(case, make_arguments(case))
    for mask in (chain(6), chain(6)[None], chain(6).expand(4, 6, 6)):
        out, lse = run_public(case, {**make_arguments(case), "tree_mask": mask.to(DEVICE)})
        assert torch.equal(out, expected[0])
        last_bit = 2e-7 if backend == "triton" else 0.0  # a separate compilation may round differently
        torch.testing.assert_close(lse, expected[1], rtol=last_bit, atol=5e-7 if last_bit else 0.0)


def test_it_takes_the_place_of_causal(backend: str) -> None:
    case = Case("causal", lengths=(40, 3), queries=5, new=5)
    results = [
        run_public(each, {**make_arguments(case), "tree_mask": drawn_mask(2, 5, 5, seed=3).to(DEVICE)})
        for each in (case, Case("not", lengths=(40, 3), queries=5, new=5, causal=False))
    ]
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


def test_a_row_that_sees_nothing_is_zero(backend: str) -> None:
    case = Case("nothing", lengths=(0, 3), queries=4, new=4)
    mask = chain(4)
    mask[2] = False
    out, lse = check(case, mask[None])
    assert bool((out[0, :, 2] == 0).all()) and bool((lse[0, :, 2] == -torch.inf).all())
    assert bool(lse[1].isfinite().all())  # the other sequence has tokens before the tree


@pytest.mark.parametrize(("stored", "dtype"), in_turn([(stored,) for stored in FORMATS], DTYPES), ids=str)
def test_what_is_not_seen_has_no_influence(stored: str, dtype: torch.dtype, backend: str) -> None:
    """NaN is in a token that only some rows see."""
    case = Case("nan", lengths=(20, 33), queries=7, new=7, dtype=dtype, splits=1, **FORMATS[stored])
    mask = star(7)
    mask[5, 3] = True  # only token 5 sees token 3, besides token 3 itself
    mask = mask[None].to(DEVICE)
    expected = run_public(case, {**make_arguments(case), "tree_mask": mask})
    for name in ("k_new", "v_new"):
        arguments = {**make_arguments(case), "tree_mask": mask}
        arguments[name][:, :, 3] = torch.nan
        found = run_public(case, arguments)
        sees = torch.zeros(7, dtype=torch.bool)
        sees[[3, 5]] = True
        assert bool(found[0][:, :, sees].isnan().all())
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one[:, :, ~sees], other[:, :, ~sees])


# --- Shapes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("queries", "heads", "stored"),
    in_turn(itertools.product([1, 5, 16, 17], [(1, 1), (6, 2), (4, 4)]), list(FORMATS)),
    ids=str,
)
def test_any_number_of_rows(queries: int, heads: tuple[int, int], stored: str, backend: str) -> None:
    size = {"queries": queries, "new": queries, "heads": heads}
    check(
        Case("rows", lengths=(0, 61, 130), capacity=152, **size, **FORMATS[stored]),
        drawn_mask(3, queries, queries, seed=queries),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stored", "dims", "dtypes"),
    in_turn(itertools.product(FORMATS, [(64, 64), (128, 72), (256, 256)]), (DTYPES, DTYPES[::-1])),
    ids=str,
)
def test_each_instance(
    stored: str, dims: tuple[int, int], dtypes: tuple[torch.dtype, torch.dtype], backend: str
) -> None:
    """One dtype has tiles of 16 rows, the other tiles of 32."""
    for heads, dtype in zip(((4, 2), (8, 1)), dtypes, strict=True):
        case = Case("dims", lengths=(50, 7), queries=4, new=4, heads=heads, dims=dims, dtype=dtype, **FORMATS[stored])
        check(case, torch.stack([tree(drawn_parents(4, seed)) for seed in (1, 2)]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page_size", "splits", "stored"),
    in_turn([(1, 1), (16, 3), (24, 0), (64, 3)], list(FORMATS), each=2),
)
def test_pages_and_splits(page_size: int, splits: int, stored: str, backend: str) -> None:
    case = Case("pages", lengths=(90, 5, 0), queries=13, new=13, capacity=192, page_size=page_size, splits=splits)
    case = replace(case, **FORMATS[stored])
    check(case, drawn_mask(3, 13, 13, seed=page_size + splits))


def test_a_large_tree_is_decoded(backend: str) -> None:
    """A tree is never treated as a prompt, with any number of queries."""
    case = Case("large", lengths=(100, 3), queries=70, new=70, heads=(4, 2), capacity=192)
    mask = torch.stack([tree(drawn_parents(70, seed)) for seed in (1, 2)])
    with fastattn.record() as calls:
        check(case, mask)
    kernels = {"torch": "PyTorch", "triton": "decode.split_kernel", "cuda": "decode_split_sm80<64, float16, 32 rows>"}
    assert {call.kernel for call in calls} == {kernels[backend]}


@pytest.mark.parametrize("new", [0, 2, 9])
def test_tokens_may_have_been_appended_before(new: int, backend: str) -> None:
    """The tree's tokens are the last ones, whenever they were appended; positions without a token are masked."""
    check(Case("before", lengths=(40, 1, 0), queries=6, new=new), drawn_mask(3, 6, 6, seed=new))


def test_options_beside_a_tree(backend: str) -> None:
    case = Case("options", lengths=(90, 5), queries=6, new=6, softcap=8.0, sinks=True, batch_invariant=True)
    check(case, torch.stack([tree(drawn_parents(6, seed)) for seed in (5, 6)]))


@pytest.mark.slow
def test_masks_of_any_strides(backend: str) -> None:
    case = Case("strides", lengths=(90, 5), queries=6, new=6)
    mask = drawn_mask(2, 6, 6, seed=9).to(DEVICE)
    padded = torch.ones(6, 2, 13, dtype=torch.bool, device=DEVICE)
    for same in (mask.mT.contiguous().mT, padded[:, :, ::2][:, :, :6].transpose(0, 1).copy_(mask)):
        decode_cases.check(case, run_public, {**make_arguments(case), "tree_mask": same})


@pytest.mark.parametrize("sequences, queries", [(0, 3), (2, 0)])
def test_nothing_to_do(sequences: int, queries: int, backend: str) -> None:
    case = Case("nothing", lengths=(5,) * sequences, queries=queries, new=queries)
    check(case, torch.ones(sequences, queries, queries, dtype=torch.bool))


# --- How it is reached ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
def test_caches_pass_it_on(paged: bool, backend: str) -> None:
    generator = torch.Generator(DEVICE).manual_seed(4)

    def drawn(heads: int, tokens: int) -> Tensor:
        return torch.randn(2, heads, tokens, 64, generator=generator, device=DEVICE, dtype=torch.float16)

    shape: dict[str, Any] = {"kv_heads": 2, "head_dim": 64, "dtype": torch.float16, "device": DEVICE}
    prompt, tokens = [drawn(heads, 9) for heads in (4, 2, 2)], [drawn(heads, 5) for heads in (4, 2, 2)]
    results = []
    for mask in (star(5)[None].to(DEVICE), None):
        if paged:
            pages = PagedKVCache(num_layers=1, num_pages=8, page_size=16, **shape)
            sequences = [pages.add() for _ in range(2)]
            pages.step(sequences, num_new=9).attend(0, *prompt)
            results.append(pages.step(sequences, num_new=5).attend(0, *tokens, tree_mask=mask))
        else:
            cache = KVCache(num_layers=1, batch=2, capacity=64, **shape)
            cache.attend(0, *prompt)
            results.append(cache.attend(0, *tokens, tree_mask=mask))
    in_tree, causal = results
    torch.testing.assert_close(in_tree[:, :, :2], causal[:, :, :2], rtol=1e-3, atol=1e-3)
    assert not torch.equal(in_tree[:, :, 4], causal[:, :, 4])


def test_out(backend: str) -> None:
    case = Case("out", lengths=(90, 5), queries=6, new=6)
    arguments = {**make_arguments(case), "tree_mask": drawn_mask(2, 6, 6, seed=2).to(DEVICE)}
    expected, _ = run_public(case, decode_cases.clone(arguments))
    out = torch.empty_like(expected)
    found, _ = run_public(case, {**arguments, "out": out})
    assert found is out and torch.equal(out, expected)


@pytest.mark.slow
def test_it_compiles(backend: str) -> None:
    dtype = torch.float32 if backend == "torch" else torch.float16
    case = Case("compiled", lengths=(90, 5), queries=6, new=6, dtype=dtype)
    arguments = {**make_arguments(case), "tree_mask": drawn_mask(1, 6, 6, seed=2).to(DEVICE)}
    expected = run_public(case, decode_cases.clone(arguments))
    compiled = torch.compile(run_public, fullgraph=True, backend="aot_eager")
    for found, wanted in zip(compiled(case, arguments), expected, strict=True):
        # In a graph on a CPU, PyTorch's operators get the whole capacity, which rounds differently.
        torch.testing.assert_close(found, wanted, **({} if backend == "torch" else {"rtol": 0, "atol": 0}))


# --- Bad input --------------------------------------------------------------------------------------------------------

QUERIES = 4
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "dtype": ({"tree_mask": torch.ones(2, QUERIES, QUERIES)}, "tree_mask: expected .*bool.*float32"),
    "rank": ({"tree_mask": chain(QUERIES)[None, None]}, r"tree_mask: expected .*\[B, Sq, Sq\].*\[1, 1, 4, 4\]"),
    "batch": ({"tree_mask": chain(QUERIES).expand(3, -1, -1)}, r"tree_mask: .*\[2, 4, 4\].*\[3, 4, 4\]"),
    "queries": ({"tree_mask": chain(3)[None]}, r"tree_mask: .*\[2, 4, 4\].*\[1, 3, 3\]"),
    "rotary": ({"rotary_cos": torch.ones(256, 8), "rotary_sin": torch.ones(256, 8)}, "rotary_cos: .*rotate query"),
    "window": ({"window": (8, 0)}, "window: .*tree_mask"),
    "alibi": ({"alibi_slopes": torch.ones(4)}, "alibi_slopes: .*tree_mask"),
    "type": ({"tree_mask": [[True]]}, "tree_mask"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused(name: str, backend: str) -> None:
    case = Case("bad", lengths=(9, 5), queries=QUERIES, new=QUERIES)
    changes, words = BAD[name]
    arguments = {**make_arguments(case), "tree_mask": chain(QUERIES)[None], **changes}
    arguments = {key: value.to(DEVICE) if isinstance(value, Tensor) else value for key, value in arguments.items()}
    before = arguments["k_cache"].clone()
    named = {key: value for key, value in arguments.items() if value is not None}
    with pytest.raises((InputError, TypeError), match=words):
        fastattn.attention_with_kv_cache(**named)
    torch.testing.assert_close(arguments["k_cache"], before, rtol=0, atol=0, equal_nan=True)


def test_a_chunk_has_no_tree() -> None:
    pages = PagedKVCache(num_layers=1, num_pages=8, page_size=16, kv_heads=2, head_dim=64, dtype=torch.float16)
    chunk = pages.chunk([pages.add()], num_new=[3])
    new = torch.zeros(3, 2, 64, dtype=torch.float16)
    with pytest.raises(InputError, match="tree_mask: expected None in a chunk"):
        chunk.attend(0, new, new, new, tree_mask=chain(3)[None])


@pytest.mark.parametrize("backend", ["cuda"], indirect=True)
def test_the_operator_checks_for_itself(backend: str) -> None:
    case = Case("operator", lengths=(9, 5), queries=QUERIES, new=QUERIES)
    good = chain(QUERIES).expand(2, -1, -1).to(DEVICE)
    bad: list[tuple[dict[str, Any], str]] = [
        ({"tree_mask": good.float()}, "tree_mask must be bool"),
        ({"tree_mask": good[:, :3]}, "tree_mask"),
        ({"tree_mask": good, "window_left": 8}, "tree_mask cannot be combined with a window"),
    ]
    for changes, words in bad:
        arguments = {**decode_cases.op_arguments(case, make_arguments(case)), "window_right": -1, **changes}
        with pytest.raises(RuntimeError, match=words):
            torch.ops.fastattn.attention_decode(**arguments)
