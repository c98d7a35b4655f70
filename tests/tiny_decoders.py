"""Tiny random models of many architectures, without tokenizers."""

from pathlib import Path

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

VOCAB_SIZE = 384
# Shorter than the tests' contexts, and no multiple of their block size.
WINDOW = 21
MAX_POSITIONS = 256

_SHAPE: dict[str, object] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
_GPT2_SHAPE: dict[str, object] = {
    "vocab_size": VOCAB_SIZE,
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": MAX_POSITIONS,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
_EXPERTS: dict[str, object] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LATENT: dict[str, object] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}

# What each has beside `_SHAPE`, by transformers' model type.
_FAMILIES: dict[str, dict[str, object]] = {
    "codegen": {**_GPT2_SHAPE, "rotary_dim": 8},
    "cohere": {},
    "cohere2": {"sliding_window": WINDOW, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]},
    "deepseek_v3": _LATENT,
    "gemma": {"head_dim": 32},
    "gemma2": {
        "head_dim": 32,
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 10.0,
    },
    "gemma3_text": {
        "head_dim": 32,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention"] * 2 + ["full_attention"],
    },
    "gpt2": _GPT2_SHAPE,
    "gpt_bigcode": _GPT2_SHAPE,
    "gpt_neox": {},
    "gpt_oss": {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW},
    "granite": {"attention_multiplier": 0.2, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    # Windows with sinks in some layers, which have other numbers of KV heads than the rest.
    "mimo_v2_flash": {
        "head_dim": 16,
        "v_head_dim": 12,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "sliding_window": WINDOW,
        "layer_types": ["full_attention"] + ["sliding_attention"] * 2,
    },
    "mixtral": {"num_local_experts": 4, "sliding_window": WINDOW},
    "olmo": {},
    "olmo2": {},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "phi": {},
    "phi3": {"sliding_window": WINDOW},
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 32},
    "qwen3_moe": {**_EXPERTS, "head_dim": 32},
    "stablelm": {},
    "starcoder2": {"sliding_window": WINDOW},
}

FAMILIES = tuple(_FAMILIES)


def make_tiny_decoder(folder: Path, family: str, **config_overrides: object) -> Path:
    """Writes a random model into `folder`, the same for the same arguments.

    Args:
        family: one of `FAMILIES`, or any other model type that is content with the common shape.
    """
    own = _FAMILIES.get(family, {})
    shape = {**({} if "n_embd" in own else _SHAPE), **own, **config_overrides}
    config = CONFIG_MAPPING[family](**shape)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _spread(name, parameter)
    model.save_pretrained(folder)
    return folder


def _spread(name: str, parameter: torch.Tensor) -> None:
    """Wide enough that greedy choices rarely tie and that every part of attention shows in the text."""
    if "norm" in name or parameter.dim() < 2:
        parameter.add_(0.1 * torch.randn(parameter.shape))
    else:
        parameter.copy_(torch.randn(parameter.shape) * (2.0 / parameter.shape[-1] ** 0.5))
