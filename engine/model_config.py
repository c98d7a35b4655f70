"""The shape of a model, read from its Hugging Face folder."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
from transformers import AutoConfig, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.kv_layout import DTYPES, TensorLayout

ARCHITECTURES = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
# Their angles depend on the length of the sequence, so cached keys would not stay valid.
_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})

JsonObject: TypeAlias = Mapping[str, object]


class ModelError(Exception):
    """The model cannot be served. The message says why, and names the file."""


class UnsupportedModel(ModelError):
    """The model is sound but needs something that this engine does not have."""


class CorruptCheckpoint(ModelError):
    """A file of the model is missing, damaged, or contradicts another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder of the Llama family.

    Attributes:
        checkpoint_dtype: a key of `DTYPES`.
        inverse_frequencies: [head_dim / 2], radians per position, RoPE scaling applied.
        rope_scale: factor on RoPE's cosines and sines.
        qkv_bias, output_bias, mlp_bias: whether those linears have one.
        qk_norm: whether each head of Q and K is RMS-normalized before RoPE.
        max_model_len: positions that the model knows, in tokens.
    """

    architecture: str
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
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    eos_token_ids: frozenset[int]
    max_model_len: int
    checkpoint_dtype: str

    def kv_tensors(self, dtype: str) -> tuple[tuple[TensorLayout, ...], ...]:
        """The K and V of each layer, computed in `dtype`."""
        key, value = (
            TensorLayout(name, self.num_kv_heads, self.head_dim, dtype) for name in ("key", "value")
        )
        return ((key, value),) * self.num_layers


def read_model_config(folder: Path) -> ModelConfig:
    """Reads config.json and generation_config.json.

    Raises:
        CorruptCheckpoint: the folder or config.json is missing, or a file does not say what it must.
        UnsupportedModel: the model needs what this engine does not have.
    """
    if not folder.is_dir():
        raise CorruptCheckpoint(f"{folder}: no such folder")
    raw = _read_json(folder / "config.json")
    architecture = _architecture(folder, raw)
    if raw.get("quantization_config") is not None:
        raise UnsupportedModel(f"{folder}: quantized checkpoints are not supported")
    config = _transformers_config(folder)
    try:
        return _from_transformers(folder, architecture, config)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CorruptCheckpoint(f"{folder / 'config.json'}: {error!r}") from error


def _read_json(path: Path) -> JsonObject:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CorruptCheckpoint(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise CorruptCheckpoint(f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise CorruptCheckpoint(f"{path}: not a JSON object")
    return value


def _architecture(folder: Path, raw: JsonObject) -> str:
    names = raw.get("architectures")
    if not isinstance(names, list) or not names:
        raise CorruptCheckpoint(f"{folder / 'config.json'}: names no architecture")
    for name in names:
        if name in ARCHITECTURES:
            return name
    known = ", ".join(sorted(ARCHITECTURES))
    raise UnsupportedModel(f"{folder}: architecture {names[0]} is not supported; these are: {known}")


def _transformers_config(folder: Path) -> PreTrainedConfig:
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    # transformers raises whatever its validators raise, plain Exception subclasses among them.
    except Exception as error:
        raise CorruptCheckpoint(f"{folder / 'config.json'}: {error}") from error


def _from_transformers(folder: Path, architecture: str, config: PreTrainedConfig) -> ModelConfig:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    max_model_len = _max_model_len(config)
    _check_supported(folder, config, head_dim, max_model_len)
    inverse_frequencies, rope_scale = _rope(config, head_dim)
    # Qwen2 and Mistral have fixed biases and ignore the fields.
    has_bias_fields = architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM")
    attention_bias = has_bias_fields and bool(config.attention_bias)
    return ModelConfig(
        architecture=architecture,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=head_dim,
        rms_norm_eps=config.rms_norm_eps,
        inverse_frequencies=inverse_frequencies,
        rope_scale=rope_scale,
        tied_embeddings=bool(config.tie_word_embeddings),
        qkv_bias=attention_bias or architecture == "Qwen2ForCausalLM",
        output_bias=attention_bias,
        mlp_bias=architecture == "LlamaForCausalLM" and bool(config.mlp_bias),
        qk_norm=architecture == "Qwen3ForCausalLM",
        eos_token_ids=_eos_token_ids(folder, config),
        max_model_len=max_model_len,
        checkpoint_dtype=_checkpoint_dtype(config),
    )


def _check_supported(folder: Path, config: PreTrainedConfig, head_dim: int, max_model_len: int) -> None:
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    for name in sizes:
        if getattr(config, name) < 1:
            raise ValueError(f"{name} is {getattr(config, name)}")
    kv_heads = config.num_key_value_heads or config.num_attention_heads
    if kv_heads < 1 or config.num_attention_heads % kv_heads or head_dim % 2:
        raise ValueError(
            f"{config.num_attention_heads} heads of {head_dim} do not share {kv_heads} KV heads evenly"
        )
    if config.hidden_act != "silu":
        raise UnsupportedModel(f"{folder}: activation {config.hidden_act} is not supported, only silu is")
    window = getattr(config, "sliding_window", None)
    sliding = any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or ())
    is_mistral = config.model_type == "mistral"
    if (sliding or is_mistral) and window is not None and window < max_model_len:
        raise UnsupportedModel(f"{folder}: a sliding window of {window} tokens is not supported")
    parameters = config.rope_parameters
    rope_type = parameters.get("rope_type", "default")
    if rope_type not in _ROPE_TYPES:
        raise UnsupportedModel(f"{folder}: RoPE scaling {rope_type} is not supported")
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModel(f"{folder}: a partial rotary factor is not supported")


def _max_model_len(config: PreTrainedConfig) -> int:
    """With YaRN `max_position_embeddings` may be the unscaled model's; the product is what it is for."""
    limit = config.max_position_embeddings
    parameters = config.rope_parameters
    original = parameters.get("original_max_position_embeddings")
    if parameters.get("rope_type") == "yarn" and original and parameters.get("factor"):
        return max(limit, int(original * parameters["factor"]))
    return limit


def _rope(config: PreTrainedConfig, head_dim: int) -> tuple[tuple[float, ...], float]:
    parameters = config.rope_parameters
    rope_type = parameters.get("rope_type", "default")
    if rope_type == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        return tuple((1.0 / (parameters["rope_theta"] ** exponents)).tolist()), 1.0
    frequencies, scale = ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"))
    return tuple(frequencies.tolist()), float(scale)


def _eos_token_ids(folder: Path, config: PreTrainedConfig) -> frozenset[int]:
    """generation_config.json's when it names some, else config.json's; none is allowed."""
    path = folder / "generation_config.json"
    eos = _read_json(path).get("eos_token_id") if path.is_file() else None
    if eos is None:
        eos = config.eos_token_id
    found = [] if eos is None else eos if isinstance(eos, list) else [eos]
    ids = [i for i in found if isinstance(i, int)]
    if len(ids) != len(found):
        raise CorruptCheckpoint(f"{folder}: eos_token_id is {eos}, not token ids")
    return frozenset(ids)


def _checkpoint_dtype(config: PreTrainedConfig) -> str:
    name = str(config.dtype).removeprefix("torch.")
    return name if name in DTYPES else "float32"
