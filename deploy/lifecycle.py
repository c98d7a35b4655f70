"""Brings a cluster up and takes it down, whoever runs its Ray."""

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Protocol

from deploy.client_access import ClientAccess
from deploy.cluster_config import ClusterConfig
from deploy.cluster_state import ClusterFolder, ClusterState
from deploy.local_cluster import LocalCluster
from deploy.readiness import ClusterError, ReadyCluster, wait_ready
from deploy.terminal import Progress


class Cluster(Protocol):
    """Where an application runs."""

    def start(self, config: ClusterConfig) -> None: ...

    def has_ended(self) -> bool:
        """By itself, though it should run."""
        ...

    def wait_end(self) -> None: ...

    def take_down(self) -> None:
        """Leaves nothing of what `start` brought."""
        ...


class BroughtUp:
    """A cluster that takes requests; taken down at the end of its block, unless it is kept."""

    def __init__(self, ready: ReadyCluster, cluster: Cluster) -> None:
        self.ready = ready
        self.kept = False
        self._cluster = cluster

    def keep(self) -> None:
        """It stays up."""
        self.kept = True

    def stay(self) -> None:
        """Returns at Ctrl-C, or when the cluster ends by itself."""
        with contextlib.suppress(KeyboardInterrupt):
            self._cluster.wait_end()


@contextlib.contextmanager
def brought_up(
    config: ClusterConfig, folder: ClusterFolder, access: ClientAccess, limit_s: float
) -> Iterator[BroughtUp]:
    """A cluster on the Ray at `config.ray_address`, or on one of its own.

    Args:
        access: to its router, beside what the configuration gives.

    Raises:
        ClusterError: it failed to start, or did not within `limit_s`; nothing is left of it.
        ModelStoreError: there is no such model; nothing was started.
    """
    _clear(folder)
    cluster = _joined(folder) if config.ray_address else LocalCluster(folder)
    up = None
    try:
        with Progress("starting") as progress:
            cluster.start(config)
            ready = wait_ready(folder, access, limit_s, progress.show, cluster.has_ended)
            up = BroughtUp(ready, cluster)
        yield up
    finally:
        if up is None or not up.kept:
            with _uninterrupted():
                cluster.take_down()


def take_down(state: ClusterState, folder: ClusterFolder) -> None:
    """What an earlier command brought up."""
    cluster = LocalCluster(folder, state) if state.session else _joined(folder)
    with _uninterrupted():
        cluster.take_down()


def _clear(folder: ClusterFolder) -> None:
    """Raises:
    ClusterError: a cluster of this name is up.
    """
    state = folder.read()
    if state is None:
        return
    if state.session is None or state.session.members():
        raise ClusterError(f"a cluster is up already in {folder.path}; `baton down` takes it down")
    take_down(state, folder)


def _joined(folder: ClusterFolder) -> Cluster:
    os.environ.setdefault("RAY_SERVE_LOG_TO_STDERR", "0")
    from deploy.joined_cluster import JoinedCluster  # brings Ray along, seconds

    return JoinedCluster(folder)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """What takes a cluster down is not left half done by a second Ctrl-C."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
