"""A cluster under Ray: it answers, scales, and replaces what dies."""

import os
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.ray.baton_command import LIMIT_S, Baton, processes_of
from tests.ray.conftest import RunningCluster


def _decode_workers(cluster: RunningCluster, requests: int) -> set[str]:
    """The workers that decoded so many requests at once."""
    with ThreadPoolExecutor(requests) as pool:
        served = pool.map(lambda number: cluster.ask(f"Once upon a time {number}", 64), range(requests))
        return {each.decode_worker for each in served}


def _connected(cluster: RunningCluster, role: str) -> set[str]:
    """The workers of a role that the router can use."""
    workers = cluster.baton.status()["workers"]
    return {each["worker_id"] for each in workers if each["role"] == role and each["state"] == "connected"}


def test_a_prompt_is_prefilled_by_one_worker_and_decoded_by_another(cluster: RunningCluster) -> None:
    served = cluster.ask("Once upon a time there was a little house")
    assert served.prefill_worker.startswith("prefill-")
    assert served.decode_worker.startswith("decode-")
    assert served.kv_bytes > 0


def test_generate_prints_the_answer(cluster: RunningCluster) -> None:
    arguments = ("generate", "Hello", "--max-tokens", "8", "--temperature", "0")
    assert cluster.baton.run(*arguments) == cluster.baton.run(*arguments) != "\n"


def test_status_shows_both_pools_and_their_kv_use(cluster: RunningCluster) -> None:
    status = cluster.baton.status()
    assert {name: pool["running"] for name, pool in status["deployments"].items()} == {
        "prefill": 1,
        "decode": 1,
        "router": 1,
    }
    assert sorted(worker["role"] for worker in status["workers"]) == ["decode", "prefill"]
    assert all(worker["num_blocks"] > 0 for worker in status["workers"])
    table = cluster.baton.run("status")
    assert "prefill" in table and "decode" in table


def test_the_state_with_its_token_is_readable_by_its_owner_only(cluster: RunningCluster) -> None:
    (path,) = cluster.baton.home.glob("*/state.json")
    assert path.stat().st_mode & 0o777 == 0o600


def test_after_scaling_both_decode_workers_serve_and_after_scaling_back_one(cluster: RunningCluster) -> None:
    before = _decode_workers(cluster, 1)
    cluster.baton.run("scale", "decode=2")
    both = _decode_workers(cluster, 8)
    assert len(both) == 2 and before < both
    cluster.baton.run("scale", "decode=1")
    assert len(_decode_workers(cluster, 4)) == 1


def test_a_killed_worker_is_replaced_and_the_router_finds_the_new_one(cluster: RunningCluster) -> None:
    before = _decode_workers(cluster, 1)
    (pid,) = cluster.baton.status()["deployments"]["decode"]["pids"]
    deadline = time.monotonic() + LIMIT_S
    os.kill(pid, signal.SIGKILL)
    while not (_connected(cluster, "decode") - before):
        assert time.monotonic() < deadline, cluster.baton.run("status")
    after = _decode_workers(cluster, 1)
    assert len(after) == 1 and after.isdisjoint(before)


@pytest.mark.parametrize("wrong", ["decode", "decode=x", "router=2", "encode=1"])
def test_scale_refuses_what_is_no_pool_and_size(cluster: RunningCluster, wrong: str) -> None:
    process = cluster.baton.start("scale", wrong)
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1
    assert f"'{wrong}': expected prefill=N or decode=N" in output


def test_demo_beside_another_cluster_answers_and_leaves_no_process(
    cluster: RunningCluster, tmp_path: Path, tiny_model: Path
) -> None:
    baton = Baton(tmp_path)
    process = baton.start("demo", "--model", str(tiny_model))
    session = _session(baton, process, "starting Ray")
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, output
    assert "KV handed over" in output and "prefill-" in output and "decode-" in output
    assert processes_of(session) == []
    assert list(tmp_path.iterdir()) == []
    assert processes_of(cluster.session)


@pytest.mark.parametrize(
    ("number", "progress"), [(signal.SIGTERM, "starting Ray"), (signal.SIGINT, "prefill 0/1")]
)
def test_an_interrupted_demo_leaves_no_process(
    tmp_path: Path, tiny_model: Path, number: signal.Signals, progress: str
) -> None:
    baton = Baton(tmp_path)
    process = baton.start("demo", "--model", str(tiny_model))
    session = _session(baton, process, progress)
    process.send_signal(number)
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode != 0, output
    assert processes_of(session) == []
    assert list(tmp_path.iterdir()) == []


def test_a_cluster_that_dies_while_it_starts_is_one_error_and_leaves_no_process(
    tmp_path: Path, tiny_model: Path
) -> None:
    baton = Baton(tmp_path)
    process = baton.start("demo", "--model", str(tiny_model))
    session = _session(baton, process, "starting Ray Serve")
    os.kill(session, signal.SIGKILL)
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1
    assert "the cluster has ended" in output
    assert processes_of(session) == []
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_model_is_one_error_and_starts_nothing(tmp_path: Path) -> None:
    baton = Baton(tmp_path)
    process = baton.start("up", "--model", "no-such-model")
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1
    assert "There is no model 'no-such-model'" in output
    assert list(tmp_path.iterdir()) == []


def _session(baton: Baton, process: subprocess.Popen[str], progress: str) -> int:
    """Of the cluster that a command is starting, as soon as it has come so far."""
    assert process.stdout is not None
    for line in process.stdout:
        if progress in line:
            (state,) = baton.states()
            return state["head_pid"]
    raise AssertionError("the command ended before its cluster was started")
