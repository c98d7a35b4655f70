"""What a model asks of an attention implementation."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from engine.batch import StepBatch
from engine.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class AttentionForm:
    """How a layer attends, beside causally.

    Attributes:
        scale: factor on the products of Q and K; None: 1 / sqrt(head_dim).
        window: tokens that a row sees, itself the last; None: all up to itself.
        logit_cap: c, where a scaled product p becomes c * tanh(p / c); None: it stays p.
        sinks: [num_heads], a logit of each head that takes part in the softmax and has no value.
    """

    scale: float | None = None
    window: int | None = None
    logit_cap: float | None = None
    sinks: Tensor | None = None


PLAIN = AttentionForm()


class StepAttention(Protocol):
    """One step's attention: what is the same in every layer has been prepared."""

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Puts the step's K and V, each [num_tokens, num_kv_heads, its head_dim], into the cache."""
        ...

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm = PLAIN
    ) -> Tensor:
        """Causal attention of every row to its sequence, after `write` of the same layer.

        Args:
            query: [num_tokens, num_heads, head_dim]. Consecutive query heads share a KV head.
            key, value: [num_tokens, num_kv_heads, head_dim], as written. V's head_dim may differ.

        Returns:
            [num_tokens, num_heads * V's head_dim], the caller's to keep until the next call.
        """
        ...


class Attention(Protocol):
    """Reads and writes the pages of a KV cache on one device."""

    def prepare(self, batch: StepBatch, cache: KVCache) -> StepAttention: ...
