"""Which cores a worker computes on, and with how many threads."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import floor

# A thread that spins while it waits takes the core that another worker computes on.
WAIT_PASSIVELY = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0", "GOMP_SPINCOUNT": "0"}

# What a worker asks of Ray when it was told no number of cores: little, so that workers can be
# added to a machine whose cores are all taken. Their cores are divided by claims, not by Ray.
NOMINAL_CPUS = 0.01


@dataclass(slots=True, frozen=True)
class Machine:
    """The cores this process may run on, and how much of them.

    `pinnable` is false where a quota grants less than the cores that are visible: others run on
    the same cores unseen, and the kernel balances better than a pin.
    """

    cores: tuple[int, ...]
    cpus: int
    pinnable: bool


@dataclass(slots=True, frozen=True)
class CoreShare:
    """One worker's part of a machine. `cores` is empty where it must not be pinned."""

    cores: tuple[int, ...]
    threads: int


def machine_of(cores: tuple[int, ...], quota: float | None) -> Machine:
    """`quota`: CPUs' worth of time that a container may use; None: all."""
    if quota is None or quota >= len(cores):
        return Machine(cores=cores, cpus=len(cores), pinnable=True)
    return Machine(cores=cores, cpus=max(1, floor(quota)), pinnable=False)


def cores_per_worker(cpus: int, workers: int, wanted: int | None) -> int:
    """An even share of `cpus` for each of `workers`, at least one; or what was asked for."""
    if wanted is not None:
        return min(wanted, cpus)
    return max(1, cpus // max(1, workers))


def choose_cores(claims: Mapping[int, int], count: int) -> tuple[int, ...]:
    """The `count` cores with the fewest claims, lowest number first.

    claims: how many workers hold each core.
    """
    by_claims = sorted(claims, key=lambda core: (claims[core], core))
    return tuple(sorted(by_claims[:count]))


def threads_on(cores: tuple[int, ...], claims: Mapping[int, int]) -> int:
    """The cores' worth that is left to one more worker when each core is divided evenly."""
    return max(1, floor(sum(1 / (claims[core] + 1) for core in cores)))


def ray_cpus(wanted: int | None, gpus: float) -> float:
    """What a worker asks of Ray."""
    if wanted is not None:
        return float(wanted)
    return 1.0 if gpus > 0 else NOMINAL_CPUS


def ray_gpus(wanted: float | None, cluster_gpus: float, workers: int) -> float:
    """GPUs of each worker: as told, or one each, or an even fraction of too few."""
    if wanted is not None:
        return wanted
    if cluster_gpus >= workers:
        return 1.0
    return floor(cluster_gpus / workers * 100) / 100
