"""The weights of a Llama-family decoder, fused for few and large matrix products."""

from dataclasses import dataclass

from torch import Tensor

from engine.checkpoint import Checkpoint
from engine.llama_config import LlamaConfig

# Old checkpoints store what is computed from the configuration.
_IGNORED = ("rotary_emb.inv_freq",)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. Matrices are [out, in]; a bias or norm is None where the family has none.

    Attributes:
        qkv: [(num_heads + 2 * num_kv_heads) * head_dim, hidden_size].
        gate_up: [2 * intermediate_size, hidden_size].
        qk_norm: [num_heads + num_kv_heads, head_dim], each head's RMSNorm weight.
    """

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    qk_norm: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class LlamaWeights:
    """`embedding` and `head`: [vocab_size, hidden_size], one tensor when they are tied."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: Tensor


def read_llama_weights(checkpoint: Checkpoint, config: LlamaConfig) -> LlamaWeights:
    """Raises:
    CorruptCheckpoint: a tensor is missing, misshapen, unreadable, or does not belong to the model.
    """
    embedding_shape = (config.vocab_size, config.hidden_size)
    embedding = checkpoint.read("model.embed_tokens.weight", embedding_shape)
    layers = tuple(_read_layer(checkpoint, config, index) for index in range(config.num_layers))
    final_norm = checkpoint.read("model.norm.weight", (config.hidden_size,))
    if config.tied_embeddings:
        head = embedding
        checkpoint.check_all_read((*_IGNORED, "lm_head.weight"))
    else:
        head = checkpoint.read("lm_head.weight", embedding_shape)
        checkpoint.check_all_read(_IGNORED)
    return LlamaWeights(embedding, layers, final_norm, head)


def _read_layer(checkpoint: Checkpoint, config: LlamaConfig, index: int) -> LayerWeights:
    at = f"model.layers.{index}"
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
    qkv_names = [f"{at}.self_attn.{name}_proj" for name in "qkv"]
    qkv_sizes = [q_size, kv_size, kv_size]
    gate_up_names = [f"{at}.mlp.gate_proj", f"{at}.mlp.up_proj"]
    gate_up_sizes = [inner, inner]

    def matrix(names: list[str], sizes: list[int], columns: int) -> Tensor:
        return checkpoint.read_fused([f"{n}.weight" for n in names], [(rows, columns) for rows in sizes])

    def bias(present: bool, names: list[str], sizes: list[int]) -> Tensor | None:
        if not present:
            return None
        return checkpoint.read_fused([f"{n}.bias" for n in names], [(rows,) for rows in sizes])

    return LayerWeights(
        input_norm=checkpoint.read(f"{at}.input_layernorm.weight", (hidden,)),
        qkv=matrix(qkv_names, qkv_sizes, hidden),
        qkv_bias=bias(config.qkv_bias, qkv_names, qkv_sizes),
        qk_norm=_read_qk_norm(checkpoint, config, at) if config.qk_norm else None,
        output=matrix([f"{at}.self_attn.o_proj"], [hidden], q_size),
        output_bias=bias(config.output_bias, [f"{at}.self_attn.o_proj"], [hidden]),
        mlp_norm=checkpoint.read(f"{at}.post_attention_layernorm.weight", (hidden,)),
        gate_up=matrix(gate_up_names, gate_up_sizes, hidden),
        gate_up_bias=bias(config.mlp_bias, gate_up_names, gate_up_sizes),
        down=matrix([f"{at}.mlp.down_proj"], [hidden], inner),
        down_bias=bias(config.mlp_bias, [f"{at}.mlp.down_proj"], [hidden]),
    )


def _read_qk_norm(checkpoint: Checkpoint, config: LlamaConfig, at: str) -> Tensor:
    norms = checkpoint.read_fused(
        [f"{at}.self_attn.q_norm.weight", f"{at}.self_attn.k_norm.weight"], [(config.head_dim,)] * 2
    ).view(2, config.head_dim)
    rows = [0] * config.num_heads + [1] * config.num_kv_heads
    return norms[rows]
