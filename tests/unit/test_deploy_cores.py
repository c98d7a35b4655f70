"""How the cores of a machine are divided between workers."""

from pathlib import Path

import pytest

from deploy.core_claims import CoreClaim
from deploy.cores import (
    NOMINAL_CPUS,
    CoreShare,
    Machine,
    choose_cores,
    cores_per_worker,
    machine_of,
    ray_cpus,
    ray_gpus,
    threads_on,
)


@pytest.mark.parametrize(
    ("cpus", "workers", "wanted", "share"),
    [
        (2, 2, None, 1),
        (2, 4, None, 1),
        (2, 1, None, 2),
        (16, 3, None, 5),
        (16, 3, 8, 8),
        (4, 2, 64, 4),
        (1, 2, None, 1),
    ],
)
def test_share_of_a_worker(cpus: int, workers: int, wanted: int | None, share: int) -> None:
    assert cores_per_worker(cpus, workers, wanted) == share


@pytest.mark.parametrize(
    ("claims", "count", "cores"),
    [
        ({0: 0, 1: 0}, 1, (0,)),
        ({0: 1, 1: 0}, 1, (1,)),
        ({0: 1, 1: 1}, 1, (0,)),
        ({0: 1, 1: 0, 2: 1, 3: 0}, 2, (1, 3)),
        ({4: 0, 5: 0, 6: 2}, 3, (4, 5, 6)),
    ],
)
def test_least_claimed_cores_are_chosen(claims: dict[int, int], count: int, cores: tuple[int, ...]) -> None:
    assert choose_cores(claims, count) == cores


@pytest.mark.parametrize(
    ("cores", "claims", "threads"),
    [((0, 1), {0: 0, 1: 0}, 2), ((0,), {0: 1}, 1), ((0, 1, 2, 3), {0: 1, 1: 1, 2: 1, 3: 1}, 2)],
)
def test_threads_are_what_a_core_still_has(
    cores: tuple[int, ...], claims: dict[int, int], threads: int
) -> None:
    assert threads_on(cores, claims) == threads


@pytest.mark.parametrize(
    ("quota", "machine"),
    [
        (None, Machine((0, 1, 2, 3), 4, pinnable=True)),
        (4.0, Machine((0, 1, 2, 3), 4, pinnable=True)),
        (2.5, Machine((0, 1, 2, 3), 2, pinnable=False)),
        (0.5, Machine((0, 1, 2, 3), 1, pinnable=False)),
    ],
)
def test_a_quota_below_the_visible_cores_forbids_pinning(quota: float | None, machine: Machine) -> None:
    assert machine_of((0, 1, 2, 3), quota) == machine


@pytest.mark.parametrize(
    ("wanted", "gpus", "cpus"), [(None, 0.0, NOMINAL_CPUS), (4, 0.0, 4.0), (None, 1.0, 1.0), (8, 1.0, 8.0)]
)
def test_what_is_asked_of_ray(wanted: int | None, gpus: float, cpus: float) -> None:
    assert ray_cpus(wanted, gpus) == cpus


@pytest.mark.parametrize(
    ("wanted", "available", "workers", "gpus"),
    [(None, 0.0, 2, 0.0), (None, 8.0, 2, 1.0), (None, 1.0, 3, 0.33), (2.0, 8.0, 2, 2.0), (0.0, 8.0, 2, 0.0)],
)
def test_gpus_of_a_worker(wanted: float | None, available: float, workers: int, gpus: float) -> None:
    assert ray_gpus(wanted, available, workers) == gpus


TWO_CORES = Machine((0, 1), 2, pinnable=True)


def test_two_workers_on_two_cores_have_one_each(tmp_path: Path) -> None:
    claims = [CoreClaim.take(TWO_CORES, 2, None, tmp_path) for _ in range(2)]
    assert [claim.share for claim in claims] == [CoreShare((0,), 1), CoreShare((1,), 1)]


def test_four_workers_on_two_cores_share_them_evenly_with_one_thread_each(tmp_path: Path) -> None:
    claims = [CoreClaim.take(TWO_CORES, 4, None, tmp_path) for _ in range(4)]
    assert sorted(claim.share.cores for claim in claims) == [(0,), (0,), (1,), (1,)]
    assert {claim.share.threads for claim in claims} == {1}


def test_a_replacement_gets_the_cores_of_the_worker_that_ended(tmp_path: Path) -> None:
    claims = [CoreClaim.take(TWO_CORES, 2, None, tmp_path) for _ in range(2)]
    claims[1].release()
    assert CoreClaim.take(TWO_CORES, 2, None, tmp_path).share.cores == (1,)


def test_under_a_quota_nothing_is_pinned(tmp_path: Path) -> None:
    claim = CoreClaim.take(Machine((0, 1, 2, 3), 2, pinnable=False), 1, None, tmp_path)
    assert claim.share == CoreShare((), 2)
