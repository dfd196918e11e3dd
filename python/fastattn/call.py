"""Defines a record of the arguments of a call, one class for each kind of call. The public function creates the record,
and the code between that function and the operator reads it.

A record's tensors come first, then the options that are checked once per signature (`functional.checked_once`). Fields
that are checked in each call, or set by fastattn itself, come last. A new option needs a field here, an argument of the
operator's schema and of ``reference``, and a parameter of the kernels. The code in between needs no change, because it
passes the whole record on.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any, NamedTuple

from torch import Tensor

UNBOUNDED = -1  # a side of ``window`` without a limit


class AttentionCall(NamedTuple):
    """Holds a call of ``attention``, or of ``attention_varlen`` if ``cu_seqlens_q`` is not None.

    The public functions document the arguments. In a checked call, options have Python's own types, ``scale`` is a
    number, ``window`` includes the causal mask, and ``causal`` is False.

    Attributes:
        exact_out: whether the output is float32. A call that computes one block of a larger call sets it, because the
            blocks' outputs are merged in float32.
        first_row, first_key, first_head: where this call's rows, keys and heads start in the larger call. Windows,
            ALiBi and dropout use positions in the larger call. With dropout, ``first_key`` is a multiple of 4. If
            ``first_row`` is None, the last row has the last key's position, and dropout counts rows from 0.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    block_table: Tensor | None = None
    key_ranges: Tensor | None = None

    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    causal: bool = False
    window: tuple[int, int] = (UNBOUNDED, UNBOUNDED)
    softcap: float = 0.0
    dropout_p: float = 0.0
    scale: float | None = None
    return_lse: bool = False
    return_max_logit: bool = False
    deterministic: bool | None = None
    batch_invariant: bool = False
    exact_out: bool = False

    first_row: int | None = None
    first_key: int = 0
    first_head: int = 0
    dropout_seed: int | Tensor | None = None

    @property
    def window_left(self) -> int:
        return self.window[0]

    @property
    def window_right(self) -> int:
        return self.window[1]

    @property
    def is_packed(self) -> bool:
        return self.cu_seqlens_q is not None

    @property
    def tensors(self) -> tuple[Any, ...]:
        """Returns the tensor fields, from ``query`` to ``key_ranges``."""
        return self[:10]

    def with_tensors(self, tensors: tuple[Any, ...]) -> AttentionCall:
        """Returns a copy of the call whose first fields are ``tensors``."""
        return AttentionCall._make((*tensors, *self[len(tensors) :]))

    def without_tensors(self) -> AttentionCall:
        """Returns a copy of the call whose tensors are None, except the dropout seed."""
        return self.with_tensors((None,) * len(self.tensors))


class DecodeCall(NamedTuple):
    """Holds a call of ``attention_with_kv_cache``. Options of a checked call have the types of a checked
    `AttentionCall`'s options."""

    query: Tensor
    k_cache: Tensor
    v_cache: Tensor
    cache_seqlens: Tensor
    k_new: Tensor | None = None
    v_new: Tensor | None = None
    rotary_cos: Tensor | None = None
    rotary_sin: Tensor | None = None
    block_table: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    tree_mask: Tensor | None = None
    out: Tensor | None = None

    rotary_interleaved: bool = False
    causal: bool = True
    window: tuple[int, int] = (UNBOUNDED, UNBOUNDED)
    softcap: float = 0.0
    scale: float | None = None
    return_lse: bool = False
    num_splits: int = 0
    batch_invariant: bool = False

    @property
    def window_left(self) -> int:
        return self.window[0]

    @property
    def window_right(self) -> int:
        return self.window[1]

    @property
    def tensors(self) -> tuple[Any, ...]:
        """Returns the tensor fields, from ``query`` to ``out``."""
        return self[:15]

    @property
    def num_new(self) -> int:
        """Returns the number of tokens to append to each sequence."""
        return 0 if self.k_new is None else self.k_new.shape[2]

    @property
    def capacity(self) -> int:
        """Returns the number of tokens that fit into the cache for each sequence."""
        return self.k_cache.shape[2] * (1 if self.block_table is None else self.block_table.shape[1])


class AppendCall(NamedTuple):
    """Holds a call of ``append_to_cache``."""

    k_new: Tensor
    v_new: Tensor
    k_cache: Tensor
    v_cache: Tensor
    slot_mapping: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


class Int8Call(NamedTuple):
    """Holds a call of ``int8_linear`` over int8 data ``weight [N, K]`` with ``scale [1, 1]``, ``[N, 1]`` or ``[N, K /
    group]``. In a checked call, ``activation`` is ``"none"`` instead of None."""

    x: Tensor
    weight: Tensor
    scale: Tensor
    bias: Tensor | None = None
    residual: Tensor | None = None

    activation: str | None = None
    input_precision: str = "16bit"

    @property
    def int8_activations(self) -> bool:
        return self.input_precision == "int8"


def on_record(function: Callable[..., Any], record: type[NamedTuple]) -> Callable[[Any], Any]:
    """Returns a function that calls ``function`` with a record's fields: a parameter gets the field of its name."""
    names = [name for name in signature(function).parameters if name in record._fields]
    return lambda call: function(**{name: getattr(call, name) for name in names})
