"""A worker's /metrics."""

import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry, Gauge

from security.development_ca import make_certificates
from security.tls_config import TlsConfig
from worker.metrics_server import MetricsServer


@pytest.fixture
def registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    Gauge("answer", "What it is.", registry=registry).set(42)
    return registry


@pytest.fixture
def secured(tmp_path: Path, registry: CollectorRegistry) -> Iterator[MetricsServer]:
    make_certificates(tmp_path)
    tls = TlsConfig(cert=tmp_path / "worker.pem", key=tmp_path / "worker.key", ca=tmp_path / "ca.pem")
    server = MetricsServer("127.0.0.1", 0, tls, registry)
    yield server
    server.stop()


def scrape(server: MetricsServer, folder: Path) -> str:
    context = ssl.create_default_context(cafile=folder / "ca.pem")
    return httpx.get(f"https://{server.address}/metrics", verify=context, trust_env=False).text


def test_without_tls_it_is_http(registry: CollectorRegistry) -> None:
    server = MetricsServer("127.0.0.1", 0, None, registry)
    try:
        assert "answer 42.0" in httpx.get(f"http://{server.address}/metrics", trust_env=False).text
    finally:
        server.stop()


def test_with_tls_plaintext_gets_nothing(secured: MetricsServer) -> None:
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://{secured.address}/metrics", trust_env=False)


def test_clients_that_say_nothing_hold_up_neither_others_nor_the_stop(
    secured: MetricsServer, tmp_path: Path
) -> None:
    host, port = secured.address.rsplit(":", 1)
    with socket.create_connection((host, int(port))), socket.create_connection((host, int(port))):
        assert "answer 42.0" in scrape(secured, tmp_path)
        secured.stop()
