"""What an engine asks of a model, whatever its family."""

from typing import Protocol

import torch
from torch import Tensor

from engine.batch import LayerHook, StepBatch
from engine.kv_cache import KVCache
from engine.kv_layout import TensorLayout


class Model(Protocol):
    """Weights on a device, and the way from a step's tokens to logits."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights and the activations."""
        ...

    @property
    def kv_tensors(self) -> tuple[tuple[TensorLayout, ...], ...]:
        """The K and V of each layer, in this model's dtype."""
        ...

    def forward(self, batch: StepBatch, cache: KVCache, hook: LayerHook | None) -> Tensor:
        """Computes a step, writing the K and V of its tokens into the cache.

        Args:
            hook: called after each layer's K and V are in the cache, before that layer's attention, with
                the step's rows as cached: what `StepAttention.write` returned. They may be strided views
                of a larger tensor, and nothing changes them later.

        Returns:
            [num_sampled, vocab_size] float32 logits of `batch.sampled_rows`.
        """
        ...
