"""Ending the processes of a session, and no others."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from deploy.process_session import ProcessSession

# A parent that ignores SIGTERM, with a child in a process group of its own, both waiting.
_STUBBORN = """
import signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()"],
                         stdin=subprocess.PIPE, process_group=0)
child.wait()
"""


@pytest.fixture
def leader() -> Iterator[int]:
    """The pid of the parent. Both processes run."""
    process = subprocess.Popen(
        [sys.executable, "-c", _STUBBORN], start_new_session=True, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    session = ProcessSession.of(process.pid)
    yield process.pid
    session.end(grace_s=0)
    process.wait()
    process.stdout.close()


def test_members_are_all_processes_of_the_session(leader: int) -> None:
    assert len(ProcessSession.of(leader).members()) == 2


def test_end_leaves_no_process_even_of_one_that_ignores_being_asked(leader: int) -> None:
    session = ProcessSession.of(leader)
    session.end(grace_s=0)
    assert session.members() == []


def test_a_later_process_with_the_number_of_the_leader_is_not_touched(leader: int) -> None:
    session = ProcessSession.of(leader)
    earlier = ProcessSession(session.leader, session.start_ticks - 1)
    earlier.end(grace_s=0)
    assert len(session.members()) == 2
