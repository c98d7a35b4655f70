"""A cluster on a Ray that somebody else runs: we bring the application and take it away again."""

import asyncio
import logging
import os
import signal
from pathlib import Path

import ray
from ray import serve

from deploy.application import deploy
from deploy.cluster_config import ClusterConfig
from deploy.cluster_state import ClusterFolder, ClusterState
from deploy.ray_directory import watch_replicas
from deploy.serve_api import APPLICATION, ROUTER


class JoinedCluster:
    """The application on a running Ray cluster, whose address is in the configuration, then in the state."""

    def __init__(self, folder: ClusterFolder) -> None:
        self._folder = folder

    def start(self, config: ClusterConfig) -> None:
        """Deploys, and returns when a router runs.

        Raises:
            ConnectionError: there is no Ray at that address.
            ConfigError: workers could be reached from other machines, and nothing protects them.
        """
        assert config.ray_address is not None
        state = ClusterState(
            model_name=config.served_name,
            tls_ca=config.tls_ca,
            api_keys_file=config.router_config().api_keys_file,
            token=_token(),
            ray_address=config.ray_address,
            dashboard_address=_connect(config.ray_address),
        )
        self._folder.create()
        self._folder.write(state)
        deploy(config)
        self._folder.write(state.model_copy(update=asyncio.run(_first_door())))

    def has_ended(self) -> bool:
        """A Ray that somebody else runs is theirs to watch."""
        return False

    def wait_end(self) -> None:
        signal.pause()

    def take_down(self) -> None:
        """Deletes the application, which drains it, and Serve too when nothing else runs on it."""
        state = self._folder.read()
        if state is None or state.ray_address is None:
            return
        if not ray.is_initialized():
            _connect(state.ray_address)
        serve.delete(APPLICATION)
        if not serve.status().applications:
            serve.shutdown()
        self._folder.remove()


def _connect(address: str) -> str | None:
    """Returns the dashboard's host:port."""
    return ray.init(
        address=address, namespace=APPLICATION, log_to_driver=False, logging_level=logging.WARNING
    ).dashboard_url


async def _first_door() -> dict[str, str]:
    async for replicas in watch_replicas(APPLICATION, (ROUTER,)):
        for replica in replicas.values():
            return dict(replica.metadata)
    raise AssertionError("the watch goes on for ever")


def _token() -> str | None:
    """Where Ray itself looks for it."""
    if token := os.environ.get("RAY_AUTH_TOKEN"):
        return token
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    return path.read_text().strip() if path.is_file() else None
