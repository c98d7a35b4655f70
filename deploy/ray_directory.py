"""Who is in the cluster, as Ray Serve's controller knows it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Mapping
from dataclasses import dataclass

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

# Serve publishes the replicas of a deployment to its own handles by long poll. It has no public name
# for that; these are the ones its handles use, and this file is the only one that knows them.
from ray.serve._private.common import DeploymentID
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE
from ray.serve._private.long_poll import LongPollNamespace

from router.cluster_view import Role
from router.worker_directory import Joined, Left

_RETRY_S = 1.0

_Key = tuple[LongPollNamespace, DeploymentID]


@dataclass(slots=True, frozen=True)
class Replica:
    """A running replica and what its `record_replica_metadata` published."""

    deployment: str
    replica_id: str
    metadata: Mapping[str, str]


async def watch_replicas(
    application: str, deployments: tuple[str, ...]
) -> AsyncIterator[Mapping[str, Replica]]:
    """Yields the running replicas, by id, at once and after every change.

    A replica that is told to leave is no longer running, from the moment that its drain begins.
    """
    keys = {
        (LongPollNamespace.DEPLOYMENT_TARGETS, DeploymentID(name=name, app_name=application)): -1
        for name in deployments
    }
    running: dict[str, dict[str, Replica]] = {}
    while True:
        try:
            controller = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
            update = await _listen(controller, keys)
        except (RayError, ValueError):
            # The controller is being restarted; the replicas go on meanwhile.
            await asyncio.sleep(_RETRY_S)
            continue
        if not isinstance(update, dict):  # the poll's own time limit
            continue
        for key, change in update.items():
            keys[key] = change.snapshot_id
            name = key[1].name
            running[name] = {
                info.replica_id.unique_id: Replica(name, info.replica_id.unique_id, info.replica_metadata)
                for info in change.object_snapshot.running_replicas
            }
        yield {key: replica for replicas in running.values() for key, replica in replicas.items()}


def _listen(controller: ActorHandle, keys: Mapping[_Key, int]) -> Awaitable[object]:
    return controller.listen_for_change.remote(dict(keys))  # pyright: ignore[reportReturnType]


class RayWorkerDirectory:
    """The workers of an application, as a router's `WorkerDirectory`."""

    def __init__(self, application: str) -> None:
        self._application = application

    async def changes(self) -> AsyncIterator[Joined | Left]:
        """Goes on for ever."""
        before: dict[str, Joined] = {}
        async for replicas in watch_replicas(self._application, tuple(role.value for role in Role)):
            now = {
                key: Joined(replica.metadata["address"], Role(replica.deployment))
                for key, replica in replicas.items()
            }
            for change in difference(before, now):
                yield change
            before = now


def difference(before: Mapping[str, Joined], now: Mapping[str, Joined]) -> list[Joined | Left]:
    """What led from `before` to `now`, both by replica: who left first, as an address may be used again."""
    left: list[Joined | Left] = [Left(worker.address) for key, worker in before.items() if key not in now]
    return left + [worker for key, worker in now.items() if key not in before]
