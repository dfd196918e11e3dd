"""Implements a key-value cache that keeps each sequence of a batch in contiguous memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Never

from fastattn.cache.protocol import AttendOptions, StepCache
from fastattn.cache.storage import CacheLayout, LayerStorage
from fastattn.checks import (
    check_dtype,
    check_int,
    check_same_device,
    check_shape,
    check_tensor,
    contents_are_checked,
    expect,
    numbers_below,
    refuse_keywords,
    shown,
)
from fastattn.dispatch.users_line import warn_at_users_line
from fastattn.errors import CacheFull
from fastattn.functional.kv_cache_attention import attention_with_kv_cache
from fastattn.quantization import as_numbers

_MOST_TOKENS = 2**31 - 1  # lengths are int32


class KVCache(StepCache):
    """Holds keys and values in contiguous memory for each layer and each sequence of a batch, and grows as needed.

    In a decoder's layer, call ``cache.attend(layer, query, k, v)`` instead of attention. ``attend`` appends the new
    tokens and attends over all tokens. A ``KVCache`` is a ``StepCache``, so models take it directly::

        cache = KVCache(num_layers, batch, kv_heads, head_dim, dtype=torch.bfloat16, device="cuda")
        logits = model(prompt, cache)       # each layer calls cache.attend(layer, ...) once
        logits = model(next_token, cache)

    Each layer must attend exactly once in a step. The cache cannot tell a second call from the next step, so a second
    call appends the tokens again. The cache warns if layer 0 attends again before the last layer has attended. If
    prompts differ in length, pad them on the right, and remove the padding afterwards with ``cache.truncate(lengths)``.

    The capacity doubles when new tokens might not fit. The host counts the tokens that it appends, so only
    ``lengths()`` reads lengths from the device. A CUDA graph captures addresses, so the cache cannot grow in a graph,
    nor once a graph has captured it: call ``reserve`` before the capture. A capture appends nothing, and the host does
    not see what a replayed graph appends: call ``note_replayed`` after each replay.

    Pass a cache to a function under ``torch.compile`` as an argument. If the function finds it in a global variable or
    in an attribute of a module, torch compiles the function again for each number of tokens.

    Args:
        num_layers, batch, kv_heads, head_dim: the number of each.
        value_dim: the values' head dim, by default ``head_dim``.
        capacity: the number of tokens per sequence for which memory is allocated at first, by default 256, or
            ``max_capacity`` if that is less. They take ``num_layers * batch * kv_heads * capacity * (head_dim +
            value_dim)`` elements.
        max_capacity: the largest capacity. Tokens beyond it raise ``CacheFull``. By default, there is no limit.
        dtype, device: of the queries, keys and values; by default torch's defaults.
        quantized: store int8 (``True``, ``"int8"`` or ``torch.int8``) or fp8 (``"fp8"`` or ``torch.float8_e4m3fn``)
            with a float32 scale for each token and head of the keys and of the values. This takes about half the memory
            of 16 bits.

    Raises:
        InputError, TypeError: an argument is wrong.
    """

    def __init__(
        self,
        num_layers: int,
        batch: int,
        kv_heads: int,
        head_dim: int,
        *,
        value_dim: int | None = None,
        capacity: int | None = None,
        max_capacity: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        quantized: bool | str | torch.dtype = False,
        **unknown: Never,
    ) -> None:
        if unknown:
            refuse_keywords(KVCache, unknown)
        check_int("num_layers", num_layers, minimum=1)
        check_int("batch", batch, minimum=0)
        if max_capacity is not None:
            check_int("max_capacity", max_capacity, minimum=1)
        capacity = check_int("capacity", min(256, max_capacity or 256) if capacity is None else capacity, minimum=1)
        fits = max_capacity is None or capacity <= max_capacity
        expect(fits, "capacity", f"at most max_capacity={max_capacity}", capacity)
        self.layout = CacheLayout.checked(kv_heads, head_dim, value_dim, dtype, device, quantized)
        self.num_layers, self.max_capacity, self._batch = num_layers, max_capacity, batch
        self._layers = [LayerStorage.allocate(self.layout, batch, capacity) for _ in range(num_layers)]
        with torch.inference_mode(False):  # for the reason in zeros_in_aligned_rows
            self._lengths = torch.zeros(num_layers, batch, dtype=torch.int32, device=self.layout.device)
        # For each layer, an upper bound of the lengths of its sequences, which the host knows without reading from the
        # device.
        self._longest = [0] * num_layers
        self._is_captured = False  # whether a CUDA graph holds the addresses of the memory

    @property
    def batch(self) -> int:
        """Returns the number of sequences."""
        return self._batch

    @property
    def capacity(self) -> int:
        """Returns the number of tokens per sequence that fit without growing."""
        return min(layer.k.shape[2] for layer in self._layers)

    @property
    def cache_seqlens(self) -> Tensor:
        """Returns the number of tokens of each sequence in every layer, int32 ``[batch]`` on the device. The result is
        a view that changes with the cache."""
        return self._lengths[-1]

    @property
    def nbytes(self) -> int:
        """Returns the number of bytes that the keys, values and scales take."""
        return sum(layer.nbytes for layer in self._layers)

    def lengths(self) -> list[int]:
        """Returns the number of tokens of each sequence, which the host reads from the device."""
        return self.cache_seqlens.tolist()

    def positions(self, num_new: int) -> Tensor:
        check_int("num_new", num_new, minimum=0)
        return self.cache_seqlens.long()[:, None] + torch.arange(num_new, device=self.cache_seqlens.device)

    def _attend(
        self, layer: int, query: Tensor, k_new: Tensor, v_new: Tensor, return_lse: bool, options: AttendOptions
    ) -> Tensor | tuple[Tensor, Tensor]:
        self._check_layer(layer)
        num_new = self.layout.check_new(self.batch, query, k_new, v_new)
        if layer == 0 and not torch.compiler.is_compiling() and self._longest[0] > self._longest[-1]:
            self._warn_of_layers_behind()
        storage, lengths = self._storage_for(layer, self._longest[layer] + num_new), self._lengths[layer]
        result = attention_with_kv_cache(
            query,
            cache_seqlens=lengths,
            k_new=k_new,
            v_new=v_new,
            return_lse=return_lse,
            **storage.arguments(),
            **options,
        )
        # A call that raises, or runs under fastattn.explain(), does not reach this line and leaves the cache unchanged.
        if storage is not self._layers[layer]:
            self._layers[layer] = storage
        lengths.add_(num_new)
        if self._is_capturing():
            self._is_captured = True
        else:
            self._longest[layer] += num_new
        return result

    def append(
        self,
        layer: int,
        k_new: Tensor,
        v_new: Tensor,
        *,
        rotary_cos: Tensor | None = None,
        rotary_sin: Tensor | None = None,
        rotary_interleaved: bool = False,
    ) -> None:
        """Appends ``k_new`` and ``v_new`` to a layer as ``attend`` does, without computing attention."""
        check_tensor("k_new", k_new)
        no_query = k_new.new_empty(self.batch, self.layout.kv_heads, 0, self.layout.head_dim)
        self.attend(
            layer,
            no_query,
            k_new,
            v_new,
            rotary_cos=rotary_cos,
            rotary_sin=rotary_sin,
            rotary_interleaved=rotary_interleaved,
        )

    def arguments(self, layer: int) -> dict[str, Any]:
        """Returns a layer's tensors as arguments of ``attention_with_kv_cache``, valid until the cache grows."""
        self._check_layer(layer)
        return {**self._layers[layer].arguments(), "cache_seqlens": self._lengths[layer]}

    def truncate(self, lengths: int | Sequence[int] | Tensor) -> None:
        """Forgets the tokens beyond ``lengths``: one int, one int per sequence, or int32 ``[batch]`` on the device.

        Use it to remove the padding of prompts, or rejected tokens of a draft model. The host does not read a tensor on
        the device, so it still counts the forgotten tokens when it decides whether to grow.
        """
        if isinstance(lengths, Tensor):
            check_shape("lengths", lengths, (self.batch,), "[batch]")
            check_dtype("lengths", lengths, (torch.int32, torch.int64))
            check_same_device("lengths", lengths, self._lengths.device)
            bounds = lengths.clamp(0, _MOST_TOKENS)
            longest = _MOST_TOKENS
        else:
            if isinstance(lengths, Integral):
                per_sequence = [check_int("lengths", lengths, minimum=0)] * self.batch
            elif isinstance(lengths, Iterable) and not isinstance(lengths, str):
                per_sequence = [check_int(f"lengths[{i}]", length, minimum=0) for i, length in enumerate(lengths)]
            else:
                raise TypeError(f"lengths: expected an int, a list of ints or a tensor, got {shown(lengths)}")
            in_range = [min(length, _MOST_TOKENS) for length in per_sequence]
            expect(len(in_range) == self.batch, "lengths", f"{self.batch} ints, one per sequence", in_range)
            bounds = torch.tensor(in_range, dtype=torch.int32).to(self._lengths.device)
            longest = max(in_range, default=0)
        torch.minimum(self._lengths, bounds.to(torch.int32), out=self._lengths)
        self._longest = [min(longest, before) for before in self._longest]

    def reset(self) -> None:
        """Forgets every token; keeps the memory."""
        self._lengths.zero_()
        self._longest = [0] * self.num_layers

    def reserve(self, capacity: int) -> None:
        """Grows the cache so that ``capacity`` tokens per sequence fit. Call it before capturing a CUDA graph.

        The old memory is kept until all tokens are copied, so running out of memory leaves the cache unchanged. Raises
        CacheFull if a CUDA graph has captured the memory, or beyond ``max_capacity``.
        """
        check_int("capacity", capacity, minimum=0)
        self._layers[:] = [self._storage_for(layer, capacity, exactly=True) for layer in range(self.num_layers)]

    def note_replayed(self, num_new: int) -> None:
        """Tells the host that a replayed CUDA graph appended ``num_new`` tokens to every layer."""
        check_int("num_new", num_new, minimum=0)
        expected = f"at most {self.capacity - max(self._longest)}, for which the captured graph had room"
        expect(max(self._longest) + num_new <= self.capacity, "num_new", expected, num_new)
        self._longest = [longest + num_new for longest in self._longest]

    def reorder(self, sequences: Tensor) -> None:
        """Replaces each sequence ``i`` by a copy of ``sequences[i]``, int64 ``[batch]``, as beam search does."""
        check_tensor("sequences", sequences)
        check_shape("sequences", sequences, (self.batch,), "[batch]")
        check_dtype("sequences", sequences, (torch.int32, torch.int64))
        check_same_device("sequences", sequences, self._lengths.device)
        if contents_are_checked(sequences):
            chosen, expected = sequences.tolist(), numbers_below(self.batch, "indices")
            expect(all(0 <= each < self.batch for each in chosen), "sequences", expected, chosen)
        sequences = sequences.clamp(0, max(self.batch - 1, 0))  # the kernel must not read out of bounds
        lengths = self._lengths.index_select(1, sequences)
        tensors = [as_numbers(tensor) for layer in self._layers for tensor in layer.tensors()]
        # Allocate all memory first. If memory ran out half-way, only some layers would be reordered.
        reordered = {(tensor.shape, tensor.dtype): torch.empty_like(tensor) for tensor in tensors}
        for tensor in tensors:
            selected = reordered[tensor.shape, tensor.dtype]
            torch.index_select(tensor, 0, sequences, out=selected)
            tensor.copy_(selected)
        self._lengths.copy_(lengths)

    def _is_capturing(self) -> bool:
        return not torch.compiler.is_compiling() and self._lengths.is_cuda and torch.cuda.is_current_stream_capturing()

    def _check_layer(self, layer: int) -> None:
        check_int("layer", layer)
        expect(0 <= layer < self.num_layers, "layer", numbers_below(self.num_layers, "a layer"), layer)

    def _warn_of_layers_behind(self) -> None:
        behind = [layer for layer, longest in enumerate(self._longest) if longest < self._longest[0]]
        warn_at_users_line(
            f"KVCache: layer 0 attends again, but layers {behind} of num_layers={self.num_layers} have not stored the "
            "tokens of its last step, so lengths() and positions() do not count them. If the model has fewer layers, "
            "pass their number as num_layers. If an exception ended that step, call cache.truncate(cache.lengths()).",
            RuntimeWarning,
        )

    def _storage_for(self, layer: int, tokens: int, exactly: bool = False) -> LayerStorage:
        """Returns the layer's memory if ``tokens`` tokens per sequence fit, else larger memory with the same contents.

        The larger memory has exactly ``tokens`` rows if ``exactly``. The caller stores the result in the cache once
        nothing can fail. Raises CacheFull.
        """
        storage = self._layers[layer]
        capacity = storage.k.shape[2]
        if tokens <= capacity:
            return storage
        if self.max_capacity is not None and tokens > self.max_capacity:
            raise CacheFull(
                f"KVCache: no room for {tokens} tokens per sequence, as max_capacity is {self.max_capacity}; make the "
                "cache with a larger max_capacity, or truncate or reset the cache"
            )
        if self._is_captured or self._is_capturing():
            raise CacheFull(
                f"KVCache: no room for {tokens} tokens per sequence, and the capacity of {capacity} cannot grow, as a "
                f"CUDA graph has captured the memory; call cache.reserve({tokens}), or more, before the capture"
            )
        wanted = tokens if exactly else max(tokens, 2 * capacity)
        grown = LayerStorage.allocate(self.layout, self.batch, min(wanted, self.max_capacity or wanted))
        grown.copy_rows(storage, self._longest[layer])
        return grown

    def __repr__(self) -> str:
        sizes = f"num_layers={self.num_layers}, batch={self.batch}, capacity={self.capacity}"
        return f"KVCache({sizes}, {self.layout.describe()})"
