"""Real workers and routers as processes, started and stopped by process id."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import httpx

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
STOP_S = 60


class ServerProcess:
    """One of our servers. `ready` is the line that it printed when it was."""

    def __init__(self, module: str, options: Sequence[str], log: Path) -> None:
        self.log = log
        self._command = [sys.executable, "-m", module, *options]
        self._process = self._start(self._command)
        self.ready: dict[str, str] = {}

    def _start(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as stream:
            return subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=stream, env={**os.environ, **ENVIRONMENT}
            )

    def start_again(self) -> Self:
        """Another life at the same address, when this one has ended. Returns when it is ready."""
        self.stop()
        _, port = self.grpc.rsplit(":", 1)
        self._process = self._start([*self._command, "--port", port])
        return self.wait_ready()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def grpc(self) -> str:
        return self.ready["grpc"]

    def wait_ready(self) -> Self:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise RuntimeError(f"ended with {code} before it was ready:\n{self.log.read_text()[-4000:]}")
        self.ready = json.loads(line)
        return self

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def wait(self) -> int:
        return self._process.wait(STOP_S)

    def stop(self) -> int:
        """Ends it politely, and after a minute for good. Returns its exit code."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)
            self._process.terminate()
        try:
            code = self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise
        finally:
            if self._process.stdout is not None:
                self._process.stdout.close()
        return code


@dataclass(frozen=True, slots=True)
class ClusterProcesses:
    """A router and its workers."""

    router: ServerProcess
    prefill: tuple[ServerProcess, ...]
    decode: tuple[ServerProcess, ...]

    @property
    def workers(self) -> tuple[ServerProcess, ...]:
        return self.prefill + self.decode


@contextmanager
def running_cluster(
    model: Path | str,
    logs: Path,
    *,
    prefill: int = 1,
    decode: int = 1,
    worker_options: Sequence[str] = (),
    router_options: Sequence[str] = (),
    pin: Sequence[int] = (),
) -> Iterator[ClusterProcesses]:
    """Starts workers side by side, then a router over them; stops all at the end.

    Args:
        model: a folder, or a name that the model store knows.
        logs: where the processes write what they log.
        pin: cores that the workers are pinned to in turn; none are pinned if it is empty.
    """
    with ExitStack() as stack:

        def start(module: str, name: str, options: Sequence[str]) -> ServerProcess:
            process = ServerProcess(module, ["--model", str(model), *options], logs / f"{name}.log")
            return stack.enter_context(process)

        def start_worker(role: str, name: str, place: int) -> ServerProcess:
            cores = ["--cores", str(pin[place % len(pin)])] if pin else []
            options = ["--worker-id", name, "--threads", "1", *cores, *worker_options]
            return start(f"{role}_worker", name, options)

        roles = [("prefill", i) for i in range(prefill)] + [("decode", i) for i in range(decode)]
        workers = {
            (role, i): start_worker(role, f"{role}-{i}", place) for place, (role, i) in enumerate(roles)
        }
        for worker in workers.values():
            worker.wait_ready()
        addresses = [x for (role, _), w in workers.items() for x in (f"--{role}", w.grpc)]
        router = start("router", "router", [*addresses, *router_options]).wait_ready()
        wait_connected(router, prefill + decode)
        yield ClusterProcesses(
            router,
            tuple(w for (role, _), w in workers.items() if role == "prefill"),
            tuple(w for (role, _), w in workers.items() if role == "decode"),
        )


def wait_connected(router: ServerProcess, num_workers: int) -> None:
    """Returns when the router has a session with every worker."""
    with httpx.Client(base_url=f"http://{router.ready['http']}") as client:
        while True:
            states = [worker["state"] for worker in client.get("/workers").json()]
            if states.count("connected") == num_workers:
                return
            time.sleep(0.05)
