"""A cluster on a Ray of its own, on this machine."""

import os
import secrets
import shutil
import socket
import subprocess
import sys

import model_store
from deploy.cluster_config import ClusterConfig, render_config
from deploy.cluster_state import ClusterFolder, ClusterState
from deploy.process_session import ProcessSession
from deploy.readiness import ClusterError

# For the head to end Ray by itself; what is left then is killed.
_END_GRACE_S = 15.0


class LocalCluster:
    """The process that owns Ray (`deploy.head`), and the session in which all its processes are."""

    def __init__(self, folder: ClusterFolder, state: ClusterState | None = None) -> None:
        """state: of a cluster that an earlier command started."""
        self._folder = folder
        self._session = None if state is None else state.session
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, config: ClusterConfig) -> None:
        """Starts it and waits for nothing.

        Raises:
            ModelStoreError: there is no such model.
            ClusterError: a door's port is taken.
        """
        model_store.resolve(config.model)
        _check_ports(config)
        self._folder.create()
        self._folder.config_file.write_text(render_config(config))
        with self._folder.log_file.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "deploy.head", str(self._folder.path)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=_environment(),
                start_new_session=True,
            )
        self._session = ProcessSession.of(self._process.pid)

    def has_ended(self) -> bool:
        return self._process is not None and self._process.poll() is not None

    def wait_end(self) -> None:
        if self._process is not None:
            self._process.wait()

    def take_down(self) -> None:
        """Ends everything that `start` started, and removes what it left on disk."""
        if self._session is None and self._process is not None:  # interrupted in `start`
            self._session = ProcessSession.of(self._process.pid)
        if self._session is not None:
            self._session.end(_END_GRACE_S)
        self.wait_end()
        state = self._folder.read()
        if state is not None and state.ray_folder is not None:
            shutil.rmtree(state.ray_folder, ignore_errors=True)
        self._folder.remove()


def _environment() -> dict[str, str]:
    own = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        # Despite its name: so Ray listens on loopback only.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    }
    return {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | own


def _check_ports(config: ClusterConfig) -> None:
    router = config.router_config()
    for option, port in (("http-port", router.http_port), ("grpc-port", router.grpc_port)):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((router.host, port))
            except OSError as error:
                raise ClusterError(
                    f"cannot listen on {router.host}:{port}: {error.strerror}; "
                    f"--{option} N takes another port, 0 a free one"
                ) from error
