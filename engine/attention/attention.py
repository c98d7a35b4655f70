"""What a model asks of an attention implementation."""

from typing import Protocol

from torch import Tensor

from engine.batch import StepBatch
from engine.kv_cache import KVCache


class StepAttention(Protocol):
    """One step's attention: what is the same in every layer has been prepared."""

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Puts the step's K and V, each [num_tokens, num_kv_heads, head_dim], into the cache."""
        ...

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Causal attention of every row to its sequence, after `write` of the same layer.

        Args:
            query: [num_tokens, num_heads, head_dim]. Consecutive query heads share a KV head.
            key, value: [num_tokens, num_kv_heads, head_dim], as written.

        Returns:
            [num_tokens, num_heads * head_dim], the caller's to keep until the next call.
        """
        ...


class Attention(Protocol):
    """Reads and writes the pages of a KV cache on one device."""

    def prepare(self, batch: StepBatch, cache: KVCache) -> StepAttention: ...
