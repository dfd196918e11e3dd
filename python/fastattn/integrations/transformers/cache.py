"""Implements a static cache for ``generate``, in the model's dtype or in 8 bits, which the kernel reads directly."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.cache_utils import DummyLayer, StaticLayer, get_layer_types_and_kwargs

from fastattn.cache.storage import QUANTIZED, zeros_in_aligned_rows
from fastattn.checks import check_choice, check_int, expect, type_name
from fastattn.errors import CacheFull, InputError
from fastattn.quantization import QUANTIZE_ROWS, as_numbers

_SERVED = ("full_attention", "sliding_attention", "dummy")


class Cache(transformers.Cache):
    """Holds keys and values of ``batch_size`` sequences of up to ``max_length`` tokens, for a model and ``generate``.

    >>> cache = Cache(model.config, batch_size=2, max_length=4096, dtype="int8")
    >>> model.generate(**inputs, cache=cache, max_new_tokens=100)  # before 5.24: past_key_values=cache

    With ``dtype="int8"`` or ``"fp8"`` (or their ``torch.dtype``) each head of a token has a scale, and attention reads
    the 8-bit values without a dequantised copy. Attention over the prompt that fills an empty cache runs in the model's
    own dtype. Only models whose ``attn_implementation`` is fastattn's can read such a cache. Beam search needs a
    ``batch_size`` of batch times beams.

    The memory is allocated when the first tokens come, and never moves. Layers with a sliding window keep all tokens,
    too. For encoder-decoders pass ``EncoderDecoderCache(Cache(…), DynamicCache())``.

    Raises:
        InputError, TypeError: an argument is wrong, or the model has layers of a kind that is not supported.
    """

    def __init__(
        self, config: Any, *, batch_size: int, max_length: int, dtype: str | torch.dtype | None = None
    ) -> None:
        if not hasattr(config, "get_text_config"):
            advice = "; pass model.config" if hasattr(config, "config") else ""
            raise TypeError(f"config: expected a model's config, got {type_name(config)}{advice}")
        check_int("batch_size", batch_size, minimum=1)
        check_int("max_length", max_length, minimum=1)
        check_choice("dtype", dtype, (None, *QUANTIZED, *QUANTIZED.values()))
        eight_bit = QUANTIZED[dtype] if isinstance(dtype, str) else dtype
        layer_types, _ = get_layer_types_and_kwargs(config.get_text_config(decoder=True))
        for layer_type in layer_types:
            came = f"a layer of kind {layer_type!r}; leave the cache out, and generate() makes transformers' own"
            expect(layer_type in _SERVED, "config", f"layers of the kinds {', '.join(_SERVED)}", came)
        layers = [
            DummyLayer() if layer_type == "dummy" else _Layer(batch_size, max_length, eight_bit)
            for layer_type in layer_types
        ]
        super().__init__(layers=layers)


def scale_of(cache: Tensor) -> Tensor:
    """Returns the scales of an 8-bit cache ``[B, Hkv, capacity, D]``, float32 ``[B, Hkv, capacity]``."""
    scale = getattr(cache, "fastattn_scale", None)
    if scale is None:
        raise InputError(
            f"key: expected keys and values as fastattn.integrations.transformers.Cache returns them, with their "
            f"scales, got {cache.dtype} without scales, because the model has copied or sliced them; make the cache as "
            "Cache(..., dtype=None) for this model"
        )
    return scale


class _Layer(StaticLayer):
    """Holds the cache of one layer: ``keys`` and ``values`` are ``[B, Hkv, capacity, D]``, with scales if they are
    8-bit.

    In memory they are ``[B, capacity, Hkv, D]``: a token's heads are adjacent, so that each token can be a page
    (eight_bit_cache.py).
    """

    cumulative_length: Tensor

    def __init__(self, batch_size: int, max_length: int, eight_bit: torch.dtype | None) -> None:
        super().__init__(max_length)
        self.batch_size = batch_size
        self.eight_bit = eight_bit
        self.is_empty = True
        # The number of tokens that the host has counted. Compiled steps do not count theirs, because a graph that reads
        # the number would guard on its value.
        self.tokens_seen = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        expect(
            key_states.shape[0] == self.batch_size,
            "batch_size",
            f"{key_states.shape[0]}, the sequences (times beams) that the model computes",
            f"{self.batch_size}; make the Cache with batch_size={key_states.shape[0]}",
        )
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = self._allocate(key_states), self._allocate(value_states)
        self.cumulative_length = self.cumulative_length.to(self.device)
        if not torch.compiler.is_compiling():
            for tensor in (*self._tensors(), self.cumulative_length):  # CUDA graphs need fixed addresses
                torch._dynamo.mark_static_address(tensor)
        self.is_initialized = True

    def _allocate(self, like: Tensor) -> Tensor:
        """Allocates zeros, and scales of 1."""
        _, heads, _, dim = like.shape
        shape = (self.batch_size, self.max_cache_len, heads)
        with torch.inference_mode(False):  # so that the scales can be written outside of that mode
            rows = zeros_in_aligned_rows((*shape, dim), self.eight_bit or like.dtype, like.device)
            cache = rows.transpose(1, 2)
            if self.eight_bit is not None:
                scale = torch.ones(shape, dtype=torch.float32, device=like.device).transpose(1, 2)
                cache.fastattn_scale = scale  # type: ignore[attr-defined]
        return cache

    def _tensors(self) -> list[Tensor]:
        """Returns all tensors that have a row for each sequence."""
        caches = [self.keys, self.values]
        return caches if self.eight_bit is None else caches + [scale_of(cache) for cache in caches]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Appends keys and values, and returns those to attend to: the new ones if the cache was empty, else all."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        num_new = key_states.shape[2]
        if not torch.compiler.is_compiling():
            if self.tokens_seen + num_new > self.max_cache_len:
                raise CacheFull(
                    f"the cache has room for {self.max_cache_len} tokens of a sequence; {self.tokens_seen} are there, "
                    f"and {num_new} come: make the Cache with max_length={self.tokens_seen + num_new} or more"
                )
            self.tokens_seen += num_new
        slots = torch.arange(num_new, device=self.device) + self.cumulative_length
        self.cumulative_length.add_(num_new)
        for cache, states in ((self.keys, key_states), (self.values, value_states)):
            if self.eight_bit is not None:
                states, scale = QUANTIZE_ROWS[self.eight_bit](states)
                scale_of(cache).index_copy_(2, slots, scale.to(torch.float32))
            as_numbers(cache).index_copy_(2, slots, as_numbers(states))
        if self.is_empty:
            self.is_empty = False
            return key_states, value_states
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Returns the number of keys that `update` will return, and the position of the first."""
        return (query_length if self.is_empty else self.max_cache_len), 0

    def get_seq_length(self) -> int | Tensor:
        return 0 if self.is_empty else self.cumulative_length

    def reset(self) -> None:
        """Forgets all tokens, and keeps the memory."""
        self.cumulative_length.zero_()
        self.tokens_seen = 0
        self.is_empty = True

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last ``-tokens_to_remove`` tokens. transformers passes a negative number."""
        check_int("tokens_to_remove", tokens_to_remove)
        expect(tokens_to_remove <= 0, "tokens_to_remove", "0 or a negative number", tokens_to_remove)
        if not self.is_empty:
            self.cumulative_length.add_(tokens_to_remove).clamp_(min=0)
            self.tokens_seen = max(self.tokens_seen + tokens_to_remove, 0)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorders the sequences in place, so that a compiled step finds its memory at the same address."""
        if not self.is_empty:
            for tensor in self._tensors():
                numbers = as_numbers(tensor)
                numbers.copy_(numbers.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._select(torch.arange(self.batch_size).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._select(indices)

    def _select(self, indices: Tensor) -> None:
        """Replaces the batch by the sequences ``indices``, in new memory."""
        before, scales = (self.keys, self.values), self._tensors()[2:]
        self.batch_size = indices.numel() if indices.dtype != torch.bool else int(indices.sum())
        if not self.is_initialized:
            return
        rows = torch.arange(before[0].shape[0])[indices.cpu()].to(self.device)
        self.keys, self.values = (self._allocate(tensor) for tensor in before)
        for mine, theirs in zip(self._tensors(), (*before, *scales), strict=True):
            as_numbers(mine).copy_(as_numbers(theirs).index_select(0, rows))
