"""Computes attention over sequences that are spread over the ranks of a process group, and shards fused linear layers.

Process groups, meshes and collectives are torch's. Importing ``fastattn`` does not import this package.
"""

from __future__ import annotations

from fastattn.distributed.context_parallel import context_parallel_attention, context_parallel_attention_varlen
from fastattn.distributed.merge import merge_attention
from fastattn.distributed.packed import PackedShards, shard_varlen
from fastattn.distributed.sequence import gather_sequence, shard_sequence
from fastattn.distributed.switch import context_parallel
from fastattn.distributed.tensor_parallel import ColwiseParallel

__all__ = [
    "ColwiseParallel",
    "PackedShards",
    "context_parallel",
    "context_parallel_attention",
    "context_parallel_attention_varlen",
    "gather_sequence",
    "merge_attention",
    "shard_sequence",
    "shard_varlen",
]
