"""Tiny random Hugging Face folders: real enough for every code path, written in milliseconds."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

IM_START, IM_END = "<|im_start|>", "<|im_end|>"
VOCAB_SIZE = 384

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_SENTENCES = (
    "system user assistant You are a helpful assistant. What is the capital of France? "
    "The quick brown fox jumps over the lazy dog while the other dogs of the town are sleeping. "
    "Once upon a time there was a little house in the middle of a dark forest, and in that house "
    "there lived an old woman who told the stories of the north wind to everyone that would listen. "
    "A prompt is read at once and the answer is written one token after another. "
    "When something breaks, the next one takes over, and the reader does not notice anything at all."
)

_SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}

_FAMILIES: dict[str, dict[str, object]] = {
    "llama": {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    "smollm": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": None},
    "qwen2": {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "use_sliding_window": False,
        "sliding_window": 4096,
    },
    # Wider heads than hidden_size / num_attention_heads, as the real ones have.
    "qwen3": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 32},
}

FAMILIES = tuple(_FAMILIES)


def make_tiny_model(
    folder: Path, family: str = "llama", *, seed: int = 0, **config_overrides: object
) -> Path:
    """Writes a random model and its tokenizer into `folder`, the same for the same arguments.

    Args:
        family: one of `FAMILIES`.
        config_overrides: fields of config.json; the weights follow the shapes they give.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer()
    eos = tokenizer.token_to_id(IM_END)
    config = {
        **_SHAPE,
        "vocab_size": VOCAB_SIZE,
        "bos_token_id": tokenizer.token_to_id(IM_START),
        "eos_token_id": eos,
        **_FAMILIES[family],
        **config_overrides,
    }
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"eos_token_id": eos, "pad_token_id": eos})
    _write_tokenizer(folder, tokenizer)
    save_file(_weights(config, seed), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")


def _tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(IM_START, special=True), AddedToken(IM_END, special=True)],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_SENTENCES], trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE, "every id of the model must have text"
    return tokenizer


def _write_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": IM_START,
            "eos_token": IM_END,
            "pad_token": IM_END,
            "clean_up_tokenization_spaces": False,
            "model_max_length": 4096,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def _weights(config: dict[str, object], seed: int) -> dict[str, torch.Tensor]:
    """Spread wide: greedy choices rarely tie, and text does not loop at once."""
    generator = torch.Generator().manual_seed(seed)

    def integer(key: str) -> int:
        value = config[key]
        assert isinstance(value, int)
        return value

    def matrix(rows: int, columns: int, gain: float) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * (gain / columns**0.5)

    def vector(size: int, mean: float) -> torch.Tensor:
        return mean + 0.1 * torch.randn(size, generator=generator)

    family = config["model_type"]
    hidden, inner, heads = (
        integer("hidden_size"),
        integer("intermediate_size"),
        integer("num_attention_heads"),
    )
    kv_heads = integer("num_key_value_heads")
    head_dim = integer("head_dim") if config.get("head_dim") else hidden // heads
    qkv_bias = family == "qwen2" or bool(config.get("attention_bias"))
    weights = {"model.embed_tokens.weight": matrix(integer("vocab_size"), hidden, 3.0)}
    for layer in range(integer("num_hidden_layers")):
        at = f"model.layers.{layer}."
        for name, rows in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            weights[f"{at}self_attn.{name}_proj.weight"] = matrix(rows * head_dim, hidden, 2.0)
            if qkv_bias:
                weights[f"{at}self_attn.{name}_proj.bias"] = vector(rows * head_dim, 0.0)
        weights[f"{at}self_attn.o_proj.weight"] = matrix(hidden, heads * head_dim, 4.0)
        if config.get("attention_bias") and family != "qwen2":
            weights[f"{at}self_attn.o_proj.bias"] = vector(hidden, 0.0)
        if family == "qwen3":
            weights[f"{at}self_attn.q_norm.weight"] = vector(head_dim, 1.0)
            weights[f"{at}self_attn.k_norm.weight"] = vector(head_dim, 1.0)
        for name, rows, columns in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
            weights[f"{at}mlp.{name}_proj.weight"] = matrix(rows, columns, 2.0)
            if config.get("mlp_bias"):
                weights[f"{at}mlp.{name}_proj.bias"] = vector(rows, 0.0)
        weights[f"{at}input_layernorm.weight"] = vector(hidden, 1.0)
        weights[f"{at}post_attention_layernorm.weight"] = vector(hidden, 1.0)
    weights["model.norm.weight"] = vector(hidden, 1.0)
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = matrix(integer("vocab_size"), hidden, 3.0)
    return weights
