"""Ends the processes of a session, and no others."""

import os
import select
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_KILL_S = 2.0


@dataclass(slots=True, frozen=True)
class ProcessSession:
    """A process that leads a session of its own, and all that it started.

    `start_ticks`, the leader's start in clock ticks since boot, tells it from a later process that
    got its number. While a member lives the kernel gives the session's number to nobody else.
    """

    leader: int
    start_ticks: int

    @classmethod
    def of(cls, leader: int) -> Self:
        """Raises:
        ProcessLookupError: there is no such process.
        """
        stat = _stat(leader)
        if stat is None:
            raise ProcessLookupError(leader)
        return cls(leader, stat.start_ticks)

    def members(self) -> list[int]:
        """The processes that run, zombies not counted."""
        leader = _stat(self.leader)
        if leader is not None and leader.start_ticks != self.start_ticks:
            return []
        found = {int(path.name): _stat(int(path.name)) for path in Path("/proc").glob("[0-9]*")}
        return [
            pid for pid, stat in found.items() if stat and stat.session == self.leader and stat.state != "Z"
        ]

    def end(self, grace_s: float) -> None:
        """Asks the leader to end, after `grace_s` whatever is left, then kills.

        Returns when no process is left.
        """
        members = self.members()
        if self.leader in members:
            _signal([self.leader], signal.SIGTERM)
            _wait(members, grace_s)
        members = self.members()
        _signal(members, signal.SIGTERM)
        _wait(members, min(grace_s, _KILL_S))
        while members := self.members():
            _signal(members, signal.SIGKILL)
            _wait(members, _KILL_S)


@dataclass(slots=True, frozen=True)
class _Stat:
    state: str
    session: int
    start_ticks: int


def _stat(pid: int) -> _Stat | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name, in parentheses, may hold anything; fields are counted after it.
    fields = text.rpartition(")")[2].split()
    return _Stat(state=fields[0], session=int(fields[3]), start_ticks=int(fields[19]))


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def _wait(pids: list[int], limit_s: float) -> None:
    """Returns when all have ended, or after `limit_s`."""
    deadline = time.monotonic() + limit_s
    for pid in pids:
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            select.select([handle], [], [], max(0.0, deadline - time.monotonic()))
        finally:
            os.close(handle)
