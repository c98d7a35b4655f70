"""A session with every worker that the directory lists."""

import asyncio
import itertools
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from router.cluster_view import LinkState, Role, WorkerSnapshot, WorkerStatus
from router.observations import Observations
from router.worker_directory import Joined, Left, WorkerDirectory
from router.worker_session import WorkerRefused, WorkerSession, role_of
from security.channel_security import ChannelSecurity

logger = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 2.0


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """What every session is made with."""

    model: str
    stall_limit_s: float
    security: ChannelSecurity
    observations: Observations = field(default_factory=Observations)


class WorkerLink:
    """One address: session after session, for as long as it is listed."""

    def __init__(self, worker: Joined, settings: LinkSettings, on_change: Callable[[], None]) -> None:
        self.address = worker.address
        self.role = worker.role
        self.state = LinkState.CONNECTING
        self.reason = ""
        self.session: WorkerSession | None = None
        self._settings = settings
        self._on_change = on_change
        self._unlisted = asyncio.Event()

    @property
    def is_expected(self) -> bool:
        """It is listed and may yet have a session."""
        has_none = self.session is None or self.session.snapshot() is None
        return has_none and self.state is not LinkState.REFUSED and not self._unlisted.is_set()

    def list(self) -> None:
        """The address is (again) one to hold a session with."""
        self._unlisted.clear()
        if self.session is not None:
            self.session.unretire()

    def unlist(self) -> None:
        """No further session; the live one ends with its last request."""
        self._unlisted.set()
        if self.session is not None:
            self.session.retire()

    async def run(self) -> None:
        """Returns when the address is unlisted and its last session is over."""
        backoff_s = FIRST_BACKOFF_S
        while not self._unlisted.is_set():
            was_connected = await self._hold_session()
            backoff_s = FIRST_BACKOFF_S if was_connected else min(2 * backoff_s, MAX_BACKOFF_S)
            try:
                async with asyncio.timeout(backoff_s * random.uniform(0.5, 1.0)):
                    await self._unlisted.wait()
            except TimeoutError:
                continue

    async def _hold_session(self) -> bool:
        """One session from start to end. Says whether it ever got as far as a description."""
        settings = self._settings
        session = WorkerSession(
            self.address,
            settings.model,
            settings.stall_limit_s,
            settings.security,
            settings.observations,
        )
        self.session = session
        try:
            reason = await session.run(self._on_heard)
            self._over(LinkState.LOST, reason)
        except WorkerRefused as error:
            self._over(LinkState.REFUSED, str(error))
        finally:
            self.session = None
            self._on_change()
        return session.description is not None

    def _on_heard(self) -> None:
        session = self.session
        if session is None or session.description is None:
            return
        if self.state is not LinkState.CONNECTED:
            self.state, self.reason = LinkState.CONNECTED, ""
            self.role = role_of(session.description)
            logger.info("connected to %s at %s", session.description.worker_id, self.address)
        self._on_change()

    def _over(self, state: LinkState, reason: str) -> None:
        if (state, reason) != (self.state, self.reason):
            logger.warning("no session with %s at %s: %s", self.role.value, self.address, reason)
        self.state, self.reason = state, reason

    def status(self) -> WorkerStatus:
        """For the operator."""
        session = self.session
        if session is None or session.description is None:
            return WorkerStatus(
                address=self.address, state=self.state.value, reason=self.reason, role=self.role.value
            )
        return _session_status(self, session)


class Fleet:
    """All links, and the numbers of the attempts that run over them."""

    def __init__(self, settings: LinkSettings) -> None:
        self.observations = settings.observations
        self._settings = settings
        self._links: dict[str, WorkerLink] = {}
        self._numbers = itertools.count(1)
        self._num_changes = 0
        self._changed = asyncio.Event()

    async def run(self, directory: WorkerDirectory) -> None:
        """Holds the sessions for as long as it runs; cancel it to end them."""
        async with asyncio.TaskGroup() as group:
            async for change in directory.changes():
                match change:
                    case Joined(address=address) if address in self._links:
                        self._links[address].list()
                    case Joined(address=address):
                        link = WorkerLink(change, self._settings, self._notify)
                        self._links[address] = link
                        group.create_task(self._keep(link), name=f"link {address}")
                    case Left(address=address) if address in self._links:
                        self._links[address].unlist()
                self._notify()

    async def _keep(self, link: WorkerLink) -> None:
        try:
            await link.run()
        finally:
            self._links.pop(link.address, None)
            self._notify()

    def next_number(self) -> int:
        """Of an attempt: larger than every one before, in every session."""
        return next(self._numbers)

    def session(self, worker: WorkerSnapshot) -> WorkerSession:
        """The session that `worker` was taken of, at the same moment.

        Raises:
            LookupError: it is over.
        """
        session = self._links[worker.address].session
        if session is None or session.id != worker.session:
            raise LookupError(f"the session with {worker.worker_id} is over")
        return session

    def snapshot(self) -> tuple[WorkerSnapshot, ...]:
        """Every worker with a live session."""
        sessions = (link.session for link in self._links.values())
        snapshots = (session.snapshot() for session in sessions if session is not None)
        return tuple(snapshot for snapshot in snapshots if snapshot is not None)

    @property
    def expects_workers(self) -> bool:
        """Some listed worker has no session, and may have one soon."""
        return any(link.is_expected for link in self._links.values())

    def statuses(self) -> list[WorkerStatus]:
        """Every listed address, connected or not."""
        return [link.status() for link in self._links.values()]

    async def next_change(self, seen: int) -> int:
        """Waits until there are other than the `seen` changes, and returns their count.

        A change is a worker that joins, leaves, or reports its load.
        """
        while self._num_changes == seen:
            self._changed.clear()
            await self._changed.wait()
        return self._num_changes

    def _notify(self) -> None:
        self._num_changes += 1
        self._changed.set()


def max_model_len(workers: tuple[WorkerSnapshot, ...], of_checkpoint: int | None) -> int | None:
    """Prompt and generated tokens together that every worker can hold. None: nobody knows yet."""
    known = [worker.capacity_tokens for worker in workers if not worker.draining]
    known += [] if of_checkpoint is None else [of_checkpoint]
    return min(known, default=None)


def count_ready(workers: tuple[WorkerSnapshot, ...], role: Role) -> int:
    """Workers of a role that take new requests."""
    return sum(worker.role is role and not worker.draining for worker in workers)


def _session_status(link: WorkerLink, session: WorkerSession) -> WorkerStatus:
    description, load = session.description, session.load
    assert description is not None
    now_s = asyncio.get_running_loop().time()
    return WorkerStatus(
        address=link.address,
        state=link.state.value,
        reason=link.reason,
        role=link.role.value,
        worker_id=description.worker_id,
        epoch=description.epoch,
        session=session.id,
        model=description.model,
        fingerprint=description.layout.model_fingerprint,
        dtype=description.layout.dtype,
        block_size=description.layout.block_size,
        num_layers=len(description.layout.layers),
        max_model_len=description.max_model_len,
        tls=description.tls,
        kv_trusted_network=description.kv_trusted_network,
        in_flight=session.in_flight,
        silent_s=None if session.heard_s is None else now_s - session.heard_s,
        draining=load and load.draining,
        num_running=load and load.num_running,
        num_waiting=load and load.num_waiting,
        waiting_prompt_tokens=load and load.waiting_prompt_tokens,
        num_blocks=load and load.num_blocks,
        free_blocks=load and load.free_blocks,
        step_s=load and load.step_s,
        prefill_tokens_per_s=load and load.prefill_tokens_per_s,
        computed_prompt_tokens=load and load.computed_prompt_tokens,
        generated_tokens=load and load.generated_tokens,
        kv_bytes_sent=load and load.kv_bytes_sent,
        kv_bytes_received=load and load.kv_bytes_received,
    )
