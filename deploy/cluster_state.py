"""What the command line remembers of a cluster between two commands."""

import os
import shutil
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict

from deploy.process_session import ProcessSession

STATE_FILE = "state.json"
CONFIG_FILE = "config.yaml"
LOG_FILE = "head.log"


class ClusterState(BaseModel):
    """One cluster. Secret: it holds Ray's token."""

    model_config = ConfigDict(frozen=True, protected_namespaces=())

    model_name: str
    token: str | None
    # Of the process that owns Ray, if we started it, and when that started.
    head_pid: int | None = None
    head_start_ticks: int = 0
    # Ray's session folder, if we started it.
    ray_folder: str | None = None
    ray_address: str | None = None
    dashboard_address: str | None = None
    # For clients: the CA of the doors' certificate if they have TLS, and where keys are.
    tls_ca: Path | None = None
    api_keys_file: Path | None = None
    # Of one router, as of now.
    grpc_address: str | None = None
    http_address: str | None = None

    @property
    def session(self) -> ProcessSession | None:
        """None: the cluster joined a Ray that somebody else runs."""
        return None if self.head_pid is None else ProcessSession(self.head_pid, self.head_start_ticks)


class ClusterFolder:
    """$BATON_HOME/NAME, by default ~/.baton/NAME: the state, the configuration and the log."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def of(cls, cluster: str) -> Self:
        home = os.environ.get("BATON_HOME")
        return cls((Path(home) if home else Path.home() / ".baton") / cluster)

    @property
    def config_file(self) -> Path:
        return self.path / CONFIG_FILE

    @property
    def log_file(self) -> Path:
        return self.path / LOG_FILE

    def create(self) -> None:
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def read(self) -> ClusterState | None:
        """None: there is no such cluster."""
        try:
            return ClusterState.model_validate_json((self.path / STATE_FILE).read_text())
        except FileNotFoundError:
            return None

    def write(self, state: ClusterState) -> None:
        """Replaces the state at once, readable by this user only."""
        temporary = self.path / f"{STATE_FILE}.{os.getpid()}"
        temporary.touch(mode=0o600)
        temporary.write_text(state.model_dump_json(indent=2))
        temporary.replace(self.path / STATE_FILE)
