"""The house's rules that a machine can check."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ALLOWED = {
    "protos": set(),
    "model_store": set(),
    "security": set(),
    "engine": set(),
    "kv_transfer": {"engine", "protos", "security"},
    "worker": {"engine", "kv_transfer", "protos", "model_store", "security"},
    "prefill_worker": {"worker", "engine", "kv_transfer", "protos", "security"},
    "decode_worker": {"worker", "engine", "kv_transfer", "protos", "security"},
    "router": {"protos", "model_store", "security"},
    "deploy": {"router", "worker", "prefill_worker", "decode_worker", "protos", "model_store", "security"},
}
FORBIDDEN_NAMES = {"utils", "util", "helpers", "common", "misc", "base", "manager"}


def imported(source: Path) -> set[str]:
    """Top-level packages that a file imports, wherever in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module.partition(".")[0])
    return names


@pytest.mark.parametrize("package", ALLOWED)
def test_imports_run_one_way(package: str):
    ours = set(ALLOWED) | {"tests", "bench"}
    for source in (ROOT / package).rglob("*.py"):
        if not source.stem.endswith(("_pb2", "_pb2_grpc")):
            wrong = imported(source) & ours - {package} - ALLOWED[package]
            assert not wrong, f"{source.relative_to(ROOT)} imports {wrong}"


@pytest.mark.parametrize("package", [*ALLOWED, "bench"])
def test_every_file_is_named_for_what_it_is(package: str):
    for source in (ROOT / package).rglob("*.py"):
        assert source.stem not in FORBIDDEN_NAMES, source.relative_to(ROOT)


# Says what gRPC is told when a process imports it.
SAID_TO_GRPC = """
import importlib.abc, os, sys

class Watch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "grpc":
            print(os.environ["GRPC_EXPERIMENTS"])

sys.meta_path.insert(0, Watch())
import {module}
"""


@pytest.mark.parametrize(
    ("module", "experiments"),
    [
        ("router.router_server", "-event_engine_client"),
        ("worker.server", "-event_engine_client,-event_engine_listener"),
        ("bench.scripted_worker", "-event_engine_client,-event_engine_listener"),
    ],
)
def test_processes_set_grpc_up_before_they_import_it(module: str, experiments: str):
    said = subprocess.run(
        [sys.executable, "-c", SAID_TO_GRPC.format(module=module)],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout.splitlines() == [experiments]
