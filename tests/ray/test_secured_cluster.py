"""`baton up` with TLS and keys: the command line comes in by itself, nobody else does."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from security.development_ca import make_certificates
from tests.ray.baton_command import LIMIT_S, Baton


def tls(folder: Path, name: str) -> dict[str, str]:
    return {
        "cert": str(folder / f"{name}.pem"),
        "key": str(folder / f"{name}.key"),
        "ca": str(folder / "ca.pem"),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of certificates, keys and configuration."""
    return tmp_path_factory.mktemp("secured")


@pytest.fixture(scope="module")
def baton(folder: Path, tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Baton]:
    make_certificates(folder)
    (folder / "keys").write_text("a-good-key\n")
    router = {
        "tls": tls(folder, "router"),
        "api_keys_file": str(folder / "keys"),
        "http_port": 0,
        "grpc_port": 0,
    }
    worker = {"tls": tls(folder, "worker"), "dtype": "float32"}
    config = {"model": str(tiny_model), "router": router, "worker": worker}
    (folder / "cluster.yaml").write_text(yaml.safe_dump(config))
    baton = Baton(tmp_path_factory.mktemp("baton-home"))
    baton.run("up", "--config", str(folder / "cluster.yaml"))
    yield baton
    baton.run("down")


def test_the_command_line_finds_the_clusters_key_and_ca(baton: Baton) -> None:
    assert baton.run("generate", "Hello", "--max-tokens", "4", "--temperature", "0") != "\n"
    workers = baton.status()["workers"]
    assert [worker["tls"] for worker in workers] == [True, True]
    assert "https://" in baton.run("status")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--ca", "ca.pem"], "UNAUTHENTICATED: an API key is needed"),
        (["--ca", "ca.pem", "--api-key", "another"], "UNAUTHENTICATED: this API key is not valid"),
        (["--ca", "clients-ca.pem", "--api-key", "a-good-key"], "UNAVAILABLE"),
        (["--api-key", "a-good-key"], "UNAVAILABLE"),
    ],
)
def test_without_the_key_or_the_ca_the_router_is_not_to_be_used(
    baton: Baton, folder: Path, options: list[str], said: str
) -> None:
    (state,) = baton.states()
    given = [str(folder / each) if each.endswith(".pem") else each for each in options]
    process = baton.start("generate", "Hello", "--router", state["grpc_address"], *given)
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1 and f"error: {said}" in output
