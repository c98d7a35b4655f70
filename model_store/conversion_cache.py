"""GGUF files as Hugging Face folders on this machine: each is converted once, whoever asks first."""

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console

from model_store.errors import ConversionFailed, PackageNotInstalled

# To be raised whenever model_store.gguf_conversion makes something else of the same file.
CONVERTER_VERSION = 1


class ConversionCache:
    """The converted models under one folder, shared by every process of this machine.

    A model's folder appears by a rename, so it is whole or not there. The lock is held by the asking
    process and by the converting one: it outlives either, and whoever holds it is the only writer.
    The converter's version is part of the path, so a newer converter makes new folders.
    """

    def __init__(self, root: Path) -> None:
        self._folder = root / f"converted-v{CONVERTER_VERSION}"

    @classmethod
    def default(cls) -> "ConversionCache":
        """$BATON_CACHE, or ~/.cache/baton."""
        configured = os.environ.get("BATON_CACHE")
        return cls(Path(configured).expanduser() if configured else Path.home() / ".cache" / "baton")

    def get(self, name: str, gguf: Path) -> Path:
        """The folder of `name`, converted from `gguf` if it is not there yet; a minute, shown on stderr.

        Raises:
            ConversionFailed: the file is not a GGUF that can be converted, or the cache cannot be written.
            PackageNotInstalled: one that reads GGUF files is missing.
        """
        target = self._folder / name
        if target.is_dir():
            return target
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with self._lock(name) as lock:
                if not target.is_dir():
                    self._convert(gguf, target, lock)
        except OSError as error:
            raise ConversionFailed(
                f"{name} could not be converted: {error}. $BATON_CACHE names the folder to write to."
            ) from error
        return target

    @contextmanager
    def _lock(self, name: str) -> Iterator[int]:
        with (self._folder / f".{name}.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file.fileno()

    def _convert(self, gguf: Path, target: Path, lock: int) -> None:
        _require_packages(target.name)
        partial = self._folder / f".{target.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)  # of a converter that was killed
        partial.mkdir()
        try:
            _run_converter(gguf, partial, target.name, lock)
            partial.rename(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def _require_packages(name: str) -> None:
    missing = [package for package in ("gguf", "accelerate") if find_spec(package) is None]
    if missing:
        raise PackageNotInstalled(f"Converting {name} needs packages: `pip install {' '.join(missing)}`.")


def _run_converter(gguf: Path, folder: Path, name: str, lock: int) -> None:
    """Converts in a process of its own: the asking one never loads torch."""
    console = Console(stderr=True)
    command = [sys.executable, "-m", "model_store.gguf_conversion", str(gguf), str(folder)]
    offline = {**os.environ, "HF_HUB_OFFLINE": "1"}  # all is in the file: a look at the hub only waits
    with (
        tempfile.TemporaryFile("w+") as complaints,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=complaints, text=True, env=offline, pass_fds=(lock,)
        ) as process,
        console.status(f"{name}: converting the model, once"),
    ):
        assert process.stdout is not None
        for step in process.stdout:
            console.print(f"{name}: {step.rstrip()}", highlight=False)
        if process.wait() != 0:
            complaints.seek(0)
            last_line = complaints.read().strip().rpartition("\n")[2]
            raise ConversionFailed(f"{gguf} could not be converted: {last_line}")
