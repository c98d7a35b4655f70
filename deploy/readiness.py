"""How far a cluster is: whether it takes requests, whether its pools have their sizes."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from deploy.client_access import ClientAccess
from deploy.cluster_state import ClusterFolder, ClusterState
from deploy.router_api import RouterApi, RouterApiError
from deploy.serve_api import ApplicationStatus, ServeApi, ServeApiError
from router.cluster_view import LinkState

_POLL_S = 0.2

Show = Callable[[str], None]


class ClusterError(Exception):
    """What was asked of a cluster did not happen. The message is for the user."""


@dataclass(slots=True, frozen=True)
class ReadyCluster:
    """A cluster that takes requests."""

    state: ClusterState
    access: ClientAccess
    grpc_address: str
    http_address: str


def wait_ready(
    folder: ClusterFolder,
    access: ClientAccess,
    limit_s: float,
    show: Show,
    has_ended: Callable[[], bool],
) -> ReadyCluster:
    """Returns when every worker of the pools is connected to a router.

    Args:
        access: to the router, beside what the cluster's own configuration gives.

    Raises:
        AccessError, RouterRefused: see there.
        ClusterError: the cluster failed to start, or did not within `limit_s`.
    """
    for state in _states(folder, limit_s, has_ended):
        if state.dashboard_address is None:
            show("starting Ray")
            continue
        status = _application_status(state)
        if status is None:
            show("starting Ray Serve")
            continue
        _check_failure(status)
        show(describe(status))
        ready = _ready(state, access.within(state), status)
        if ready is not None:
            return ready
    raise ClusterError(f"not ready after {limit_s:.0f} s; see {folder.log_file}")


def _states(folder: ClusterFolder, limit_s: float, has_ended: Callable[[], bool]) -> Iterator[ClusterState]:
    """The state, again and again, until the time is up."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if has_ended():
            raise ClusterError(f"the cluster has ended:\n{log_tail(folder.log_file)}")
        state = folder.read()
        if state is not None:
            yield state
        time.sleep(_POLL_S)


def _application_status(state: ClusterState) -> ApplicationStatus | None:
    try:
        return serve_api(state).status()
    except ServeApiError:
        return None


def _check_failure(status: ApplicationStatus) -> None:
    if status.status != "DEPLOY_FAILED":
        return
    for name, deployment in status.deployments.items():
        if deployment.failed:
            cause = deployment.message.strip().splitlines()[-1:]
            raise ClusterError("\n".join([f"{name} does not start: {''.join(cause)}", deployment.message]))
    raise ClusterError(status.message)


def _ready(state: ClusterState, access: ClientAccess, status: ApplicationStatus) -> ReadyCluster | None:
    if status.status != "RUNNING" or state.grpc_address is None or state.http_address is None:
        return None
    expected = sum(each.target for name, each in status.deployments.items() if name in ("prefill", "decode"))
    try:
        connected = RouterApi(state.http_address, access).workers()
    except RouterApiError:
        return None
    if sum(worker.state == LinkState.CONNECTED.value for worker in connected) < expected:
        return None
    return ReadyCluster(state, access, state.grpc_address, state.http_address)


def describe(status: ApplicationStatus) -> str:
    """How far the pools are, in one line."""
    order = ("prefill", "decode", "router")
    pools = [(name, status.deployments[name]) for name in order if name in status.deployments]
    return " · ".join(
        f"{name} {pool.running}/{pool.target}" + (f" ({pool.stopping} leaving)" if pool.stopping else "")
        for name, pool in pools
    )


def log_tail(log: Path, lines: int = 15) -> str:
    try:
        return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
    except FileNotFoundError:
        return ""


def serve_api(state: ClusterState) -> ServeApi:
    """Raises:
    ClusterError: Ray has not told its dashboard's address yet.
    """
    if state.dashboard_address is None:
        raise ClusterError("the cluster is still starting")
    return ServeApi(state.dashboard_address, state.token)


def set_sizes(state: ClusterState, targets: dict[str, int], limit_s: float, show: Show) -> None:
    """Sets the sizes of pools and returns when they have them, and those that leave have left.

    Raises:
        ClusterError: a pool could not be brought to its size within `limit_s`.
    """
    api = serve_api(state)
    for pool, replicas in targets.items():
        api.scale(pool, replicas)
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        status = api.status()
        if status is None:
            raise ClusterError("the application is gone")
        show(describe(status))
        if all(_has_size(status, pool, replicas) for pool, replicas in targets.items()):
            return
        time.sleep(_POLL_S)
    raise ClusterError(f"not done after {limit_s:.0f} s")


def _has_size(status: ApplicationStatus, pool: str, replicas: int) -> bool:
    deployment = status.deployments[pool]
    return deployment.target == replicas and deployment.settled
