"""Divides the cores of a machine between worker processes that know nothing of each other."""

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Self

from deploy.cores import CoreShare, Machine, choose_cores, cores_per_worker, machine_of, threads_on


class CoreClaim:
    """Cores held by this process, on this machine, until `release` or its death.

    Each claim on a core is a locked file; the kernel frees it with the process, so a replacement
    finds the cores of the worker that died. All clusters of a user share the files: two clusters
    on one machine do not pin themselves to the same core while another is free.
    """

    def __init__(self, share: CoreShare, locks: tuple[int, ...]) -> None:
        self.share = share
        self._locks = locks

    @classmethod
    def take(cls, machine: Machine, workers: int, wanted: int | None, folder: Path | None = None) -> Self:
        """Claims the least claimed cores.

        workers: how many are expected on this machine.
        wanted: cores of this worker; None: an even share.
        folder: where the lock files are. Default: one for this user.
        """
        num_cores = cores_per_worker(machine.cpus, workers, wanted)
        if not machine.pinnable:
            return cls(CoreShare(cores=(), threads=num_cores), ())
        folder = folder or Path(tempfile.gettempdir()) / f"baton-cores-{os.getuid()}"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _alone(folder):
            claims = {core: _count_claims(folder, core) for core in machine.cores}
            cores = choose_cores(claims, num_cores)
            share = CoreShare(cores=cores, threads=threads_on(cores, claims))
            return cls(share, tuple(_claim(folder, core) for core in cores))

    def release(self) -> None:
        for lock in self._locks:
            os.close(lock)
        self._locks = ()


def this_machine() -> Machine:
    """What this process may use of the machine it runs on, before it is pinned."""
    return machine_of(tuple(sorted(os.sched_getaffinity(0))), _cpu_quota(Path("/sys/fs/cgroup/cpu.max")))


def _cpu_quota(path: Path) -> float | None:
    """CPUs' worth of time from cgroup v2's "quota period", where quota can be "max"."""
    try:
        quota, period = path.read_text().split()
    except OSError:
        return None
    return None if quota == "max" else int(quota) / int(period)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    lock = os.open(folder / "claiming", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _try_lock(path: Path) -> int | None:
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


def _count_claims(folder: Path, core: int) -> int:
    held = 0
    for path in folder.glob(f"core-{core}.*"):
        lock = _try_lock(path)
        if lock is None:
            held += 1
        else:
            os.close(lock)
    return held


def _claim(folder: Path, core: int) -> int:
    for number in count():
        lock = _try_lock(folder / f"core-{core}.{number}")
        if lock is not None:
            return lock
    raise AssertionError("count() ends never")
