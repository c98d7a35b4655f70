"""The shape of a decoder of the Llama family."""

from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.kv_layout import TensorLayout
from engine.model_config import CorruptCheckpoint, ModelConfig, rope_parameters

_ARCHITECTURES = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
# Their angles depend on nothing but the position.
_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """What `engine.llama` computes.

    Attributes:
        inverse_frequencies: [head_dim / 2], radians per position, RoPE scaling applied.
        rope_scale: factor on RoPE's cosines and sines.
        windows: of each layer, tokens that a row sees, itself the last; None: all up to itself.
        qkv_bias, output_bias, mlp_bias: whether those linears have one.
        qk_norm: whether each head of Q and K is RMS-normalized before RoPE.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    inverse_frequencies: tuple[float, ...]
    rope_scale: float
    windows: tuple[int | None, ...]
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool

    def kv_tensors(self, dtype: str) -> tuple[tuple[TensorLayout, ...], ...]:
        """The K and V of each layer, computed in `dtype`."""
        key, value = (
            TensorLayout(name, self.num_kv_heads, self.head_dim, dtype) for name in ("key", "value")
        )
        return ((key, value),) * self.num_layers


def llama_config(model: ModelConfig) -> LlamaConfig | None:
    """None: not of the family, or with something that the lean decoder does not compute.

    Raises:
        CorruptCheckpoint: the sizes make no sense.
    """
    if model.architecture not in _ARCHITECTURES:
        return None
    try:
        _check_sizes(model.hf_config)
        return _from_transformers(model) if _is_lean(model.hf_config) else None
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CorruptCheckpoint(f"{model.folder / 'config.json'}: {error!r}") from error


def _check_sizes(config: PreTrainedConfig) -> None:
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    for name in sizes:
        if getattr(config, name) < 1:
            raise ValueError(f"{name} is {getattr(config, name)}")
    head_dim, kv_heads = _head_dim(config), _num_kv_heads(config)
    if kv_heads < 1 or config.num_attention_heads % kv_heads or head_dim % 2:
        raise ValueError(
            f"{config.num_attention_heads} heads of {head_dim} do not share {kv_heads} KV heads evenly"
        )


def _head_dim(config: PreTrainedConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _num_kv_heads(config: PreTrainedConfig) -> int:
    return config.num_key_value_heads or config.num_attention_heads


def _is_lean(config: PreTrainedConfig) -> bool:
    kinds = set(getattr(config, "layer_types", None) or ())
    return (
        config.hidden_act == "silu"
        and kinds <= {"full_attention", "sliding_attention"}
        and len(rope_parameters(config)) == 1
        and config.rope_parameters.get("rope_type", "default") in _ROPE_TYPES
        and config.rope_parameters.get("partial_rotary_factor", 1.0) == 1.0
    )


def _from_transformers(model: ModelConfig) -> LlamaConfig:
    config, architecture = model.hf_config, model.architecture
    inverse_frequencies, rope_scale = _rope(config)
    # Qwen2 and Mistral have fixed biases and ignore the fields.
    has_bias_fields = architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM")
    attention_bias = has_bias_fields and bool(config.attention_bias)
    return LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=_num_kv_heads(config),
        head_dim=_head_dim(config),
        rms_norm_eps=config.rms_norm_eps,
        inverse_frequencies=inverse_frequencies,
        rope_scale=rope_scale,
        windows=_windows(architecture, config),
        tied_embeddings=bool(config.tie_word_embeddings),
        qkv_bias=attention_bias or architecture == "Qwen2ForCausalLM",
        output_bias=attention_bias,
        mlp_bias=architecture == "LlamaForCausalLM" and bool(config.mlp_bias),
        qk_norm=architecture == "Qwen3ForCausalLM",
    )


def _windows(architecture: str, config: PreTrainedConfig) -> tuple[int | None, ...]:
    """Mistral's layers are all alike; Qwen's follow `layer_types`; Llama has no windows."""
    if architecture == "LlamaForCausalLM":
        return (None,) * config.num_hidden_layers
    if architecture == "MistralForCausalLM":
        return (config.sliding_window,) * config.num_hidden_layers
    return tuple(
        config.sliding_window if kind == "sliding_attention" else None for kind in config.layer_types
    )


def _rope(config: PreTrainedConfig) -> tuple[tuple[float, ...], float]:
    parameters = config.rope_parameters
    rope_type = parameters.get("rope_type", "default")
    if rope_type == "default":
        head_dim = _head_dim(config)
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        return tuple((1.0 / (parameters["rope_theta"] ** exponents)).tolist()), 1.0
    frequencies, scale = ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"))
    return tuple(frequencies.tolist()), float(scale)
