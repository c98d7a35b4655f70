import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.checkpoint import model_fingerprint
from engine.model_config import CorruptCheckpoint, UnsupportedModel
from tests.engine.model_steps import ModelSteps, model_of, random_tokens
from tests.tiny_models import make_tiny_model

DOWN = "model.layers.1.mlp.down_proj.weight"


def logits(folder: Path) -> Tensor:
    return ModelSteps(model_of(folder), random_tokens(20)).prefill(0, 20, 20)


def shard(folder: Path) -> None:
    """As large checkpoints are stored: several files and an index."""
    weights = load_file(folder / "model.safetensors")
    names = sorted(weights)
    files = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in files.items():
        save_file({name: weights[name] for name in part}, folder / file)
    index = {"weight_map": {name: file for file, part in files.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()


def edit(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


def test_shards_hold_the_same_model(tmp_path: Path):
    make_tiny_model(tmp_path)
    expected = logits(tmp_path)
    shard(tmp_path)
    assert torch.equal(logits(tmp_path), expected)


def test_weights_are_converted_to_the_wanted_dtype(tmp_path: Path):
    make_tiny_model(tmp_path)
    edit(tmp_path, lambda w: w.update({name: t.to(torch.float16) for name, t in w.items()}))
    assert model_of(tmp_path, torch.bfloat16).dtype == torch.bfloat16


def test_a_tied_head_in_the_file_is_not_a_surprise(tmp_path: Path):
    make_tiny_model(tmp_path, "smollm")
    expected = logits(tmp_path)
    edit(tmp_path, lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"].clone()}))
    assert torch.equal(logits(tmp_path), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop(DOWN), f"there is no tensor {DOWN}"),
        (lambda w: w.pop("lm_head.weight"), "there is no tensor lm_head.weight"),
        (
            lambda w: w.update({DOWN: torch.zeros(64, 127)}),
            r"is \[64, 127\], its config.json says \[64, 128\]",
        ),
        (lambda w: w.update({"model.layers.3.extra": torch.zeros(1)}), "do not belong to this architecture"),
    ],
    ids=["missing", "missing head", "misshapen", "surplus"],
)
def test_tensors_that_do_not_fit_are_named(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], object], message: str
):
    make_tiny_model(tmp_path)
    edit(tmp_path, change)
    with pytest.raises(CorruptCheckpoint, match=message):
        model_of(tmp_path)


def test_integer_weights_are_unsupported(tmp_path: Path):
    make_tiny_model(tmp_path)
    edit(tmp_path, lambda w: w.update({DOWN: torch.zeros(64, 128, dtype=torch.int8)}))
    with pytest.raises(UnsupportedModel, match="only float weights"):
        model_of(tmp_path)


@pytest.mark.parametrize("kept_bytes", [0, 4, 100, 5000, -1])
def test_a_truncated_file_is_corrupt(tmp_path: Path, kept_bytes: int):
    make_tiny_model(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept_bytes])
    with pytest.raises(CorruptCheckpoint, match=r"model\.safetensors"):
        model_of(tmp_path)


def test_missing_weights_are_corrupt(tmp_path: Path):
    make_tiny_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CorruptCheckpoint, match="neither"):
        model_of(tmp_path)
    with pytest.raises(CorruptCheckpoint, match="neither"):
        model_fingerprint(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path):
    make_tiny_model(tmp_path)
    shard(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CorruptCheckpoint, match="model-00002-of-00002"):
        model_of(tmp_path)


@pytest.mark.parametrize("content", ["", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}'])
def test_a_damaged_index_is_named(tmp_path: Path, content: str):
    make_tiny_model(tmp_path)
    shard(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CorruptCheckpoint, match=r"index\.json"):
        model_of(tmp_path)


def test_equal_folders_have_equal_fingerprints(tmp_path: Path):
    make_tiny_model(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    config = tmp_path / "b" / "config.json"
    config.write_text(json.dumps({"transformers_version": "1.2.3"} | json.loads(config.read_text())))
    assert model_fingerprint(tmp_path / "a") == model_fingerprint(tmp_path / "b")


def test_fingerprints_tell_models_apart(tmp_path: Path):
    folders = [
        make_tiny_model(tmp_path / "a"),
        make_tiny_model(tmp_path / "other weights", seed=1),
        make_tiny_model(tmp_path / "other config", rope_theta=5e5),
        make_tiny_model(tmp_path / "other family", "mistral"),
        make_tiny_model(tmp_path / "sharded"),
    ]
    shard(folders[-1])
    assert len({model_fingerprint(folder) for folder in folders}) == len(folders)
