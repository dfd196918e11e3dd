"""Turns text into packed batches of bytes: reads it, cuts it into passages and packs them up to a token budget."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

BOUNDARY = 256  # the token before the first byte of a passage and after its last one
VOCAB_SIZE = 257  # the bytes and BOUNDARY
IGNORED = -100  # a target that cross_entropy ignores


@dataclass(frozen=True)
class PackedBatch:
    """Holds packed documents, one after the other. The target of each token is the next token of its document.

    ``tokens``, ``targets`` and ``positions`` are int64 ``[total]``, ``cu_seqlens`` is int32 ``[documents + 1]``.
    """

    tokens: Tensor
    targets: Tensor
    positions: Tensor
    cu_seqlens: Tensor
    max_seqlen: int

    @property
    def num_tokens(self) -> int:
        return self.tokens.shape[0]

    def to(self, device: torch.device) -> PackedBatch:
        packed = (self.tokens, self.targets, self.positions, self.cu_seqlens)
        tokens, targets, positions, cu_seqlens = (tensor.to(device) for tensor in packed)
        return PackedBatch(tokens, targets, positions, cu_seqlens, self.max_seqlen)

    def padded(self) -> PackedBatch:
        """Returns the same documents, padded at the end to one length; targets in the padding are ``IGNORED``."""
        lengths = self.cu_seqlens.diff().tolist()

        def pad(packed: Tensor, value: int) -> Tensor:
            return pad_sequence(list(packed.split(lengths)), batch_first=True, padding_value=value).flatten()

        cu_seqlens = torch.arange(len(lengths) + 1, device=self.tokens.device, dtype=torch.int32) * self.max_seqlen
        tokens, targets, positions = pad(self.tokens, BOUNDARY), pad(self.targets, IGNORED), pad(self.positions, 0)
        return PackedBatch(tokens, targets, positions, cu_seqlens, self.max_seqlen)


def read_documents(path: Path | None) -> list[str]:
    """Returns the file's text, or without a file the topics of the language reference that every Python contains."""
    if path is not None:
        return [path.read_text(encoding="utf-8", errors="replace")]
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)]


def cut_into_passages(documents: list[str], max_length: int) -> list[bytes]:
    """Returns passages of at most ``max_length`` bytes: as many whole paragraphs as fit, or a part of a longer one."""
    passages = []
    for document in documents:
        passage = b""
        for paragraph in document.split("\n\n"):
            encoded = paragraph.strip("\n").encode()
            if not encoded:
                continue
            if passage and len(passage) + 2 + len(encoded) <= max_length:
                passage += b"\n\n" + encoded
                continue
            passages.append(passage)
            while len(encoded) > max_length:
                passages.append(encoded[:max_length])
                encoded = encoded[max_length:]
            passage = encoded
        passages.append(passage)
    return [passage for passage in passages if passage]


def split(passages: list[bytes], held_out: float, seed: int) -> tuple[list[bytes], list[bytes]]:
    """Returns the passages to train on, and a random fraction ``held_out`` of them (at least one) to hold out."""
    shuffled = random.Random(seed).sample(passages, len(passages))
    num_held_out = max(1, round(held_out * len(passages)))
    if num_held_out >= len(passages):
        raise ValueError(
            f"a text of {len(passages)} passages is too short to train on; pass a longer one or a smaller --max-length"
        )
    return shuffled[num_held_out:], shuffled[:num_held_out]


def pack(passages: list[bytes]) -> PackedBatch:
    """Returns one batch of all passages. A passage of n bytes has n + 1 tokens, the first of which is ``BOUNDARY``."""
    inputs = [torch.tensor([BOUNDARY, *passage]) for passage in passages]
    targets = [torch.tensor([*passage, BOUNDARY]) for passage in passages]
    lengths = torch.tensor([len(document) for document in inputs])
    return PackedBatch(
        tokens=torch.cat(inputs),
        targets=torch.cat(targets),
        positions=torch.cat([torch.arange(len(document)) for document in inputs]),
        cu_seqlens=F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32),
        max_seqlen=int(lengths.max()),
    )


def bucketed_batches(passages: list[bytes], token_budget: int, rng: random.Random) -> list[PackedBatch]:
    """Returns the batches of one epoch in random order, each of passages of similar length.

    A batch has at most ``token_budget`` tokens, or a single passage. Similar lengths need little padding, for which
    plain PyTorch, and the last tile of a kernel, waste work.
    """
    shuffled = rng.sample(passages, len(passages))
    batches: list[list[bytes]] = [[]]
    num_tokens = 0
    for passage in sorted(shuffled, key=len):  # a stable sort: equal lengths stay shuffled
        if batches[-1] and num_tokens + len(passage) + 1 > token_budget:
            batches.append([])
            num_tokens = 0
        batches[-1].append(passage)
        num_tokens += len(passage) + 1
    rng.shuffle(batches)
    return [pack(batch) for batch in batches]


def entropies(passages: list[bytes]) -> tuple[float, float]:
    """Returns two entropies of the text in nats per byte: of a byte, and of a byte given the byte before it.

    Without working attention a model sees one byte at a time, and its loss on this text cannot fall below the second
    entropy. So a loss below it proves that attention works.
    """
    text = np.concatenate([np.array([BOUNDARY, *passage, BOUNDARY]) for passage in passages])
    # The boundary after a passage and the boundary before the next passage are not a pair of neighbours.
    pairs = np.stack([text[:-1], text[1:]])[:, ~((text[:-1] == BOUNDARY) & (text[1:] == BOUNDARY))]

    def entropy(symbols: np.ndarray) -> float:
        counts = np.unique(symbols, return_counts=True)[1]
        share = counts / counts.sum()
        return float(-(share * np.log(share)).sum())

    return entropy(pairs[1]), entropy(pairs[0] * VOCAB_SIZE + pairs[1]) - entropy(pairs[0])
