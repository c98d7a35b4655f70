"""Names to folders, and what is said when there is none."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from model_store import resolve
from model_store.embedded import EmbeddedModel
from model_store.errors import CorruptFile, IncompleteFolder, PackageNotInstalled, UnknownModel
from model_store.hub import is_hub_id


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder, as small as one can be."""
    (tmp_path / "config.json").write_text("{}")
    save_file({"weight": np.zeros(4, dtype=np.float32)}, tmp_path / "model.safetensors")
    Tokenizer(WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_a_folder_resolves_to_its_absolute_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    assert resolve(f"./{folder.name}") == folder.resolve()


def test_a_folder_wins_over_a_hub_id_of_the_same_form(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent.parent)
    name = f"{folder.parent.name}/{folder.name}"
    assert is_hub_id(name)
    assert resolve(name) == folder.resolve()


@pytest.mark.parametrize("name", ["", "llama", "./nowhere", "/nowhere/at/all", "a/b/c"])
def test_an_unknown_name_is_refused_with_what_is_possible(name: str) -> None:
    with pytest.raises(UnknownModel, match=r"smollm2-135m .*folder.*hub id"):
        resolve(name)


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("config.json", "no config.json"),
        ("model.safetensors", "no weights"),
        ("tokenizer.json", "no tokenizer.json"),
    ],
)
def test_a_folder_without_a_needed_file_is_refused(folder: Path, missing: str, said: str) -> None:
    (folder / missing).unlink()
    with pytest.raises(IncompleteFolder, match=said):
        resolve(str(folder))


def test_a_folder_without_one_of_its_shards_is_refused(folder: Path) -> None:
    weight_map = {"weight": "model.safetensors", "other": "model-2.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(IncompleteFolder, match=r"no model-2\.safetensors"):
        resolve(str(folder))


def test_a_folder_with_all_of_its_shards_resolves(folder: Path) -> None:
    weight_map = {"weight": "model.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert resolve(str(folder)) == folder.resolve()


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", b"{"),
        ("config.json", b"[]"),
        ("config.json", b"\xff\xfe"),
        ("tokenizer.json", b"{}"),
        ("model.safetensors", b""),
        ("model.safetensors", b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 269060552\n"),
        ("model.safetensors.index.json", b"{}"),
    ],
)
def test_a_corrupt_file_is_refused_by_name(folder: Path, file: str, content: bytes) -> None:
    (folder / file).write_bytes(content)
    with pytest.raises(CorruptFile, match=file):
        resolve(str(folder))


def test_weights_cut_short_are_refused(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(CorruptFile, match="not a whole safetensors file"):
        resolve(str(folder))


def test_a_missing_package_is_named_with_the_command_that_installs_it() -> None:
    model = EmbeddedModel(name="absent", package="baton-no-such-package", install_hint="run `make setup`.")
    with pytest.raises(PackageNotInstalled, match=r"baton-no-such-package.*make setup"):
        model.gguf_path()


def test_a_package_without_a_gguf_file_is_refused() -> None:
    model = EmbeddedModel(name="absent", package="pytest", install_hint="run `make setup`.")
    with pytest.raises(PackageNotInstalled, match="pytest carries no GGUF"):
        model.gguf_path()


def test_a_hub_id_without_a_hub_is_one_clear_error(tmp_path: Path) -> None:
    result = _run_in_new_process("owner/name", HF_HOME=str(tmp_path), HF_HUB_OFFLINE="1")
    assert result.returncode == 1
    assert result.stderr.strip() == (
        "There is no folder owner/name, and the hub cannot be reached to fetch a model of that name."
    )


def test_resolving_loads_neither_torch_nor_transformers(folder: Path) -> None:
    script = (
        "import sys, model_store\n"
        "model_store.resolve(sys.argv[1])\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script, str(folder)], capture_output=True, text=True, check=True, timeout=60
    )
    assert result.stdout.strip() == "[]"


def test_the_command_prints_the_folder(folder: Path) -> None:
    result = _run_in_new_process(str(folder))
    assert (result.returncode, result.stdout.strip()) == (0, str(folder.resolve()))


def _run_in_new_process(model: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "model_store", model],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
