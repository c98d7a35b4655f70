"""A lean decoder for the Llama family: Llama, SmolLM2, Mistral, Qwen2, Qwen3."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention.attention import Attention, AttentionForm, StepAttention
from engine.batch import LayerHook, StepBatch
from engine.checkpoint import Checkpoint
from engine.kv_cache import KVCache
from engine.kv_layout import TensorLayout
from engine.llama_config import LlamaConfig
from engine.llama_weights import LayerWeights, LlamaWeights, read_llama_weights


class LlamaModel:
    """Implements `engine.model.Model`.

    At one row a step, the launches of small operations cost as much as the matrices: hence fused weights,
    tables instead of arithmetic, and sums in place.
    """

    def __init__(
        self, config: LlamaConfig, weights: LlamaWeights, attention: Attention, max_positions: int
    ) -> None:
        """`max_positions`: how long a sequence can be, in tokens."""
        self._config = config
        self._weights = weights
        self._attention = attention
        self._forms = tuple(AttentionForm(window=window) for window in config.windows)
        self._cos, self._sin = _rope_tables(config, max_positions, weights.embedding)

    @classmethod
    def load(
        cls,
        folder: Path,
        config: LlamaConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        attention: Attention,
        max_positions: int,
    ) -> "LlamaModel":
        """Reads the weights of the folder that `config` was read from.

        Raises:
            CorruptCheckpoint: they are missing, damaged or do not fit the configuration.
        """
        weights = read_llama_weights(Checkpoint(folder, dtype, device), config)
        return cls(config, weights, attention, max_positions)

    @property
    def vocab_size(self) -> int:
        return self._config.vocab_size

    @property
    def device(self) -> torch.device:
        return self._weights.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self._weights.embedding.dtype

    @property
    def kv_tensors(self) -> tuple[tuple[TensorLayout, ...], ...]:
        return self._config.kv_tensors(str(self.dtype).removeprefix("torch."))

    @torch.inference_mode()
    def forward(self, batch: StepBatch, cache: KVCache, hook: LayerHook | None) -> Tensor:
        attention = self._attention.prepare(batch, cache)
        cos = self._cos.index_select(0, batch.positions)
        sin = self._sin.index_select(0, batch.positions)
        hidden = F.embedding(batch.token_ids, self._weights.embedding)
        last = len(self._weights.layers) - 1
        for index, layer in enumerate(self._weights.layers):
            attended = self._attend(index, layer, hidden, cos, sin, attention, hook)
            if index == last:
                # From here on only the rows that are sampled matter.
                hidden = hidden.index_select(0, batch.sampled_rows)
                attended = attended.index_select(0, batch.sampled_rows)
            _add_linear(hidden, attended, layer.output, layer.output_bias)
            self._add_mlp(layer, hidden)
        return F.linear(self._norm(hidden, self._weights.final_norm), self._weights.head).float()

    def _attend(
        self,
        index: int,
        layer: LayerWeights,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        attention: StepAttention,
        hook: LayerHook | None,
    ) -> Tensor:
        """[num_tokens, num_heads * head_dim], before the output projection."""
        config = self._config
        qkv = F.linear(self._norm(hidden, layer.input_norm), layer.qkv, layer.qkv_bias)
        heads = qkv.view(hidden.shape[0], -1, config.head_dim)
        num_rotated = config.num_heads + config.num_kv_heads
        rotated, value = heads[:, :num_rotated], heads[:, num_rotated:]
        if layer.qk_norm is not None:
            rotated = F.rms_norm(rotated, (config.head_dim,), eps=config.rms_norm_eps) * layer.qk_norm
        # [a, b] * cos + [b, a] * [-sin, sin], a and b being the halves of a head.
        swapped = rotated.roll(config.head_dim // 2, -1)
        rotated = torch.addcmul(rotated * cos, swapped, sin)
        query, key = rotated[:, : config.num_heads], rotated[:, config.num_heads :]
        attention.write(index, key, value)
        if hook is not None:
            hook(index)
        return attention.attend(index, query, key, value, self._forms[index])

    def _add_mlp(self, layer: LayerWeights, hidden: Tensor) -> None:
        gate_up = F.linear(self._norm(hidden, layer.mlp_norm), layer.gate_up, layer.gate_up_bias)
        gate, up = gate_up.split(self._config.intermediate_size, -1)
        _add_linear(hidden, F.silu(gate).mul_(up), layer.down, layer.down_bias)

    def _norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(hidden, weight.shape, weight, self._config.rms_norm_eps)


def _add_linear(hidden: Tensor, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """hidden += inputs @ weight.T + bias, in place."""
    hidden.addmm_(inputs, weight.t())
    if bias is not None:
        hidden.add_(bias)


def _rope_tables(config: LlamaConfig, max_positions: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines, and sines with the first half negated: [max_positions, 1, head_dim] each, `like`'s dtype."""
    frequencies = torch.tensor(config.inverse_frequencies, dtype=torch.float32)
    angles = torch.arange(max_positions, dtype=torch.float32).unsqueeze(1) * frequencies
    cos, sin = angles.cos() * config.rope_scale, angles.sin() * config.rope_scale
    tables = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    cos, sin = (t.to(like.device, like.dtype).unsqueeze(1) for t in tables)
    return cos, sin
