"""What a router is told when replicas come and go, and what Serve's details say."""

from deploy.ray_directory import difference
from deploy.serve_api import parse_application
from router.cluster_view import Role
from router.worker_directory import Joined, Left

PREFILL = Joined("127.0.0.1:1", Role.PREFILL)
DECODE = Joined("127.0.0.1:2", Role.DECODE)


def test_new_replicas_join() -> None:
    assert difference({}, {"a": PREFILL, "b": DECODE}) == [PREFILL, DECODE]


def test_missing_replicas_leave() -> None:
    assert difference({"a": PREFILL, "b": DECODE}, {"b": DECODE}) == [Left(PREFILL.address)]


def test_nothing_changes_without_a_change() -> None:
    assert difference({"a": PREFILL}, {"a": PREFILL}) == []


def test_a_replacement_at_the_same_address_leaves_before_it_joins() -> None:
    assert difference({"a": PREFILL}, {"b": PREFILL}) == [Left(PREFILL.address), PREFILL]


def test_replicas_are_counted_by_state() -> None:
    states = ("RUNNING", "RUNNING", "STARTING", "STOPPING", "UPDATING")
    details = {
        "status": "RUNNING",
        "message": "",
        "deployments": {
            "decode": {
                "status": "UPSCALING",
                "message": "m",
                "target_num_replicas": 3,
                "replicas": [{"state": state, "pid": pid} for pid, state in enumerate(states)],
            }
        },
    }
    application = parse_application(details)
    assert application is not None
    pool = application.deployments["decode"]
    assert (pool.target, pool.running, pool.starting, pool.stopping) == (3, 2, 2, 1)
    assert pool.pids == (0, 1)
    assert not pool.settled


def test_an_application_that_is_not_there_has_no_status() -> None:
    assert parse_application(None) is None
