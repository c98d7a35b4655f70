import json
from pathlib import Path

import pytest

from engine.llama_config import LlamaConfig, llama_config
from engine.model_config import CorruptCheckpoint, UnsupportedModel, read_model_config
from tests.tiny_models import make_tiny_model


def test_reads_the_shape(tiny_model: Path):
    config = read_model_config(tiny_model)
    lean = llama_config(config)
    assert lean is not None
    assert (lean.num_layers, lean.num_heads, lean.num_kv_heads, lean.head_dim) == (3, 4, 2, 16)
    assert lean.vocab_size == 384
    assert lean.windows == (None, None, None)
    assert config.max_model_len == 4096
    assert config.eos_token_ids == {1}
    assert config.checkpoint_dtype == "float32"


@pytest.mark.parametrize(
    ("generation", "expected"), [({"eos_token_id": [1, 7]}, {1, 7}), ({}, {5}), (None, {5})]
)
def test_eos_tokens_come_from_the_generation_config_first(
    tmp_path: Path, generation: dict[str, object] | None, expected: set[int]
):
    make_tiny_model(tmp_path, eos_token_id=5)
    path = tmp_path / "generation_config.json"
    if generation is None:
        path.unlink()
    else:
        path.write_text(json.dumps(generation))
    assert read_model_config(tmp_path).eos_token_ids == expected


def test_yarn_extends_the_models_limit(tmp_path: Path):
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    assert read_model_config(make_tiny_model(tmp_path, rope_scaling=scaling)).max_model_len == 16384


LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "factor": 2.0,
    "original_max_position_embeddings": 128,
}


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("llama", {"hidden_act": "gelu"}),
        ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
        ("llama", {"rope_scaling": LONGROPE}),
        (
            "llama",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        ),
    ],
)
def test_what_the_lean_decoder_does_not_compute_is_left_to_transformers(
    tmp_path: Path, family: str, fields: dict[str, object]
):
    make_tiny_model(tmp_path, family)
    _change(tmp_path / "config.json", fields)
    assert llama_config(read_model_config(tmp_path)) is None


@pytest.mark.parametrize(
    ("family", "fields", "windows"),
    [
        ("mistral", {"sliding_window": 1024}, (1024, 1024, 1024)),
        ("mistral", {"sliding_window": None}, (None, None, None)),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0},
            (64, 64, 64),
        ),
        (
            "qwen3",
            {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
            (None, 64, 64),
        ),
        ("qwen3", {"use_sliding_window": False, "sliding_window": 64}, (None, None, None)),
    ],
)
def test_each_layer_has_its_window(
    tmp_path: Path, family: str, fields: dict[str, object], windows: tuple[int | None, ...]
):
    make_tiny_model(tmp_path, family, **fields)
    lean = llama_config(read_model_config(tmp_path))
    assert isinstance(lean, LlamaConfig) and lean.windows == windows


def test_the_limit_is_where_angles_begin_to_depend_on_the_length(tmp_path: Path):
    assert read_model_config(make_tiny_model(tmp_path, rope_scaling=LONGROPE)).max_model_len == 128


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not supported.* is LlamaForCausalLM"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantized"),
        (
            {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]},
            "T5ForConditionalGeneration is not supported: it has an encoder",
        ),
        (
            {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]},
            "not a model of text alone",
        ),
        ({"model_type": "vit", "architectures": ["ViTModel"]}, "decoder of type vit is missing"),
        ({"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}, "own needs code of its own"),
    ],
)
def test_refuses_what_is_no_decoder_of_text_with_code_here(
    tmp_path: Path, fields: dict[str, object], reason: str
):
    make_tiny_model(tmp_path)
    _change(tmp_path / "config.json", fields)
    with pytest.raises(UnsupportedModel, match=reason):
        read_model_config(tmp_path)


@pytest.mark.parametrize(
    "fields",
    [
        {"architectures": None},
        {"architectures": []},
        {"hidden_size": "abc"},
        {"hidden_size": -64},
        {"num_hidden_layers": 0},
        {"num_key_value_heads": 3},
        {"vocab_size": None},
        {"model_type": "no such type"},
        {"rope_theta": "abc"},
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
    ],
    ids=str,
)
def test_a_configuration_that_makes_no_sense_is_corrupt(tmp_path: Path, fields: dict[str, object]):
    make_tiny_model(tmp_path)
    _change(tmp_path / "config.json", fields)
    with pytest.raises(CorruptCheckpoint, match=str(tmp_path)):
        llama_config(read_model_config(tmp_path))


@pytest.mark.parametrize("content", [None, "", "{", "[1]", "\x00"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str, content: str | None):
    make_tiny_model(tmp_path)
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    elif name == "config.json":
        path.unlink()
    else:
        path.write_text('{"eos_token_id": "x"}')
    with pytest.raises(CorruptCheckpoint, match=str(tmp_path)):
        read_model_config(tmp_path)


def test_a_missing_folder_is_named(tmp_path: Path):
    with pytest.raises(CorruptCheckpoint, match="nowhere: no such folder"):
        read_model_config(tmp_path / "nowhere")


def _change(path: Path, fields: dict[str, object]) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
