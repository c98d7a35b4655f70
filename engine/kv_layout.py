"""What the K and V of a model look like in an engine's pages."""

from dataclasses import dataclass

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """One named tensor of a layer: per token [num_heads, head_dim]."""

    name: str
    num_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class KVLayout:
    """What two engines must agree on to hand KV over.

    Attributes:
        model_fingerprint: hex digest of the model's configuration and weights.
        dtype: a key of `DTYPES`.
        block_size: tokens in a block.
        layers: the tensors of each layer, in wire order.
    """

    model_fingerprint: str
    dtype: str
    block_size: int
    layers: tuple[tuple[TensorLayout, ...], ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    def layer_token_bytes(self, layer: int) -> int:
        """Bytes of one token in one layer, all its tensors."""
        return sum(t.num_heads * t.head_dim for t in self.layers[layer]) * self.torch_dtype.itemsize

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers."""
        return sum(self.layer_token_bytes(layer) for layer in range(len(self.layers)))
