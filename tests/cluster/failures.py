"""Workers of a local cluster that die or stop at a named point."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from protos import kv_pb2
from tests.cluster.local_cluster import LocalCluster
from tests.transfer.proxy import Cut, Hold, Proxy

# Every way that KV goes from worker to worker.
_HANDOFF_METHODS = ("Push", "Frames", "Bulk")


_dying: set[asyncio.Task[None]] = set()


class Role(Enum):
    PREFILL = "prefill"
    DECODE = "decode"


class How(Enum):
    """DIES: its connections break. STOPS: it is silent, as after SIGSTOP."""

    DIES = "dies"
    STOPS = "stops"


class Point(Enum):
    """Of a hand-off."""

    BEFORE_THE_GRANT = "before-the-grant"
    IN_A_CHUNK = "in-a-chunk"
    BEFORE_THE_COMMIT = "before-the-commit"

    def is_reached(self, method: str, message: bytes) -> bool:
        match self:
            case Point.BEFORE_THE_GRANT:
                return method == "Push" and _kind(message) == "open"
            case Point.IN_A_CHUNK:
                return method == "Frames" or (method == "Bulk" and _announces(message))
            case Point.BEFORE_THE_COMMIT:
                return method == "Push" and _kind(message) == "commit"


def _kind(message: bytes) -> str | None:
    return kv_pb2.PushMessage.FromString(message).WhichOneof("message")


def _announces(message: bytes) -> bool:
    return bool(kv_pb2.BulkMessage.FromString(message).frames)


@dataclass(eq=False)
class Failure:
    """Loses the worker of a role of a role when the first hand-off comes to a point."""

    cluster: LocalCluster
    role: Role
    how: How
    point: Point
    happened: asyncio.Event = field(default_factory=asyncio.Event)

    is_armed: bool = False

    def __post_init__(self) -> None:
        """Before the first hand-off: a pair of workers may keep its streams for all."""
        for proxy in self.cluster.proxies:
            for method in _HANDOFF_METHODS:
                proxy.alter[method] = self._watch(proxy, method)

    def _watch(self, receiver: Proxy, method: str) -> Callable[[bytes], bytes]:
        def watch(message: bytes) -> bytes:
            if self.is_armed and not self.happened.is_set() and self.point.is_reached(method, message):
                self._happen(receiver)
                if self.role is Role.PREFILL:
                    raise Cut if self.how is How.DIES else Hold
            return message

        return watch

    def _happen(self, receiver: Proxy) -> None:
        self.happened.set()
        lose(receiver if self.role is Role.DECODE else self._prefilling(), self.how)

    def _prefilling(self) -> Proxy:
        """Before the worker that has the request."""
        busy = [len(worker.legs) > 0 for worker in self.cluster.prefill]
        return self.cluster.prefill_proxies[busy.index(True)]


def lose(victim: Proxy, how: How) -> None:
    """Loses the worker behind a proxy."""
    if how is How.STOPS:
        victim.flowing.clear()
    else:
        dying = asyncio.create_task(victim.die())
        _dying.add(dying)
        dying.add_done_callback(_dying.discard)
