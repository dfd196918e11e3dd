"""Attention over sequences that are spread over the ranks of a process group.

Process groups, meshes and collectives are torch's. Importing ``fastattn`` does not import this package.
"""

from __future__ import annotations

from fastattn.distributed.context_parallel import context_parallel_attention
from fastattn.distributed.merge import merge_attention
from fastattn.distributed.sequence import gather_sequence, shard_sequence

__all__ = ["context_parallel_attention", "gather_sequence", "merge_attention", "shard_sequence"]
