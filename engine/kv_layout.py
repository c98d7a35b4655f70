"""What the K and V of a model look like in an engine's pages."""

from dataclasses import dataclass

import torch

# What a model computes in.
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# What a tensor of the cache may be stored in.
CACHED_DTYPES = {**DTYPES, "int8": torch.int8, "fp8": torch.float8_e4m3fn}


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """One named tensor of a layer, as cached: per token [num_heads, head_dim] in a dtype of its own.

    Attributes:
        dtype: a key of `CACHED_DTYPES`.
    """

    name: str
    num_heads: int
    head_dim: int
    dtype: str

    @property
    def torch_dtype(self) -> torch.dtype:
        return CACHED_DTYPES[self.dtype]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token."""
        return self.num_heads * self.head_dim * self.torch_dtype.itemsize


@dataclass(frozen=True, slots=True)
class KVLayout:
    """What two engines must agree on to hand KV over.

    Attributes:
        model_fingerprint: hex digest of the model's configuration and weights.
        dtype: of K and V, by which routers pair workers; a tensor's own dtype is what its bytes have.
        block_size: tokens in a block.
        layers: the tensors of each layer, in wire order.
    """

    model_fingerprint: str
    dtype: str
    block_size: int
    layers: tuple[tuple[TensorLayout, ...], ...]

    def layer_token_bytes(self, layer: int) -> int:
        """Bytes of one token in one layer, all its tensors."""
        return sum(tensor.token_bytes for tensor in self.layers[layer])

    @property
    def largest_block_bytes(self) -> int:
        """Bytes of one block of the layer that has the most."""
        return self.block_size * max(self.layer_token_bytes(layer) for layer in range(len(self.layers)))

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers."""
        return sum(self.layer_token_bytes(layer) for layer in range(len(self.layers)))
