"""How the command line shows things."""

import time
from types import TracebackType
from typing import Self

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from deploy.readiness import ReadyCluster
from deploy.serve_api import ApplicationStatus
from router.cluster_view import WorkerStatus
from router.explanation import Explanation

_COST_TERMS = ("wait_s", "prefill_s", "transfer_s", "decode_s", "disturbance_s")

console = Console()
errors = Console(stderr=True)


class Progress:
    """What is being waited for: a spinner on a terminal, elsewhere a line for each change."""

    def __init__(self, what: str) -> None:
        self._start_s = time.monotonic()
        self._status = console.status(what)
        self._shown = ""
        self.show(what)

    def __enter__(self) -> Self:
        self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._status.stop()

    def show(self, what: str) -> None:
        elapsed = f"[dim]{time.monotonic() - self._start_s:4.0f} s[/dim]"
        self._status.update(f"{what} {elapsed}")
        if what != self._shown and not console.is_terminal:
            console.print(f"{elapsed}  {what}")
        self._shown = what


def pools_table(status: ApplicationStatus) -> Table:
    table = Table(
        "pool",
        "wanted",
        "running",
        "starting",
        "leaving",
        "",
        title=f"Pools: {status.status}",
        box=SIMPLE_HEAD,
    )
    for name, pool in status.deployments.items():
        counts = (pool.target, pool.running, pool.starting, pool.stopping)
        table.add_row(name, *map(str, counts), pool.message.splitlines()[0] if pool.message else "")
    return table


def workers_table(workers: list[WorkerStatus]) -> Table:
    table = Table(title="Workers", box=SIMPLE_HEAD)
    for heading in ("worker", "state", "TLS"):
        table.add_column(heading)
    for heading in ("running", "waiting", "KV use", "step ms", "KV MB out/in"):
        table.add_column(heading, justify="right")
    for worker in sorted(workers, key=lambda worker: (worker.role != "prefill", worker.worker_id or "")):
        state = "draining" if worker.draining else worker.state
        table.add_row(
            worker.worker_id or f"{worker.role} {worker.address}",
            f"{state}: {worker.reason}" if worker.reason else state,
            _tls(worker),
            _count(worker.num_running),
            _count(worker.num_waiting),
            _kv_use(worker),
            f"{worker.step_s * 1e3:.1f}" if worker.step_s else "-",
            f"{(worker.kv_bytes_sent or 0) / 1e6:.1f}/{(worker.kv_bytes_received or 0) / 1e6:.1f}",
        )
    return table


def explanation_table(explanation: Explanation) -> Table:
    """The chosen placement first."""
    if explanation.decided_unix_s is None:
        wait = explanation.expected_ttft_s
        when = "now" if wait is None else f"now; first token expected after {wait * 1e3:.0f} ms"
    else:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(explanation.decided_unix_s))
    table = Table(title=f"{explanation.num_tokens} tokens, {when}", box=SIMPLE_HEAD)
    for heading in ("prefill", "decode"):
        table.add_column(heading)
    for heading in ("cached", "cost ms", *(term.replace("_s", "") for term in _COST_TERMS)):
        table.add_column(heading, justify="right")
    for each in explanation.candidates:
        alone = "the same" if each.prefill_worker == each.decode_worker else each.decode_worker
        costs = (each.cost_s, *(getattr(each, term) for term in _COST_TERMS))
        table.add_row(
            each.prefill_worker,
            alone,
            f"{each.cached_prefill_tokens}/{each.cached_decode_tokens}",
            *(f"{seconds * 1e3:.1f}" for seconds in costs),
        )
    return table


def _tls(worker: WorkerStatus) -> str:
    if worker.tls is None:
        return "-"
    plain_kv = " (KV: trusted network)" if worker.kv_trusted_network else ""
    return ("yes" if worker.tls else "no") + plain_kv


def _count(number: int | None) -> str:
    return "-" if number is None else str(number)


def _kv_use(worker: WorkerStatus) -> str:
    if not worker.num_blocks or worker.free_blocks is None:
        return "-"
    return f"{1 - worker.free_blocks / worker.num_blocks:.1%}"


def megabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.1f} MB"


def print_ready(cluster: ReadyCluster, option: str = "") -> None:
    """Where requests go, in a form that can be pasted.

    Args:
        option: that names the cluster, where it needs one.
    """
    name, access = cluster.state.model_name, cluster.access
    url = f"{access.scheme}://{cluster.http_address}/v1"
    console.print(f"[green]ready[/green]: {name}")
    console.print(f"  gRPC    {cluster.grpc_address}    (baton.v1.Inference)")
    console.print(f"  OpenAI  {url}")
    body = f'{{"model": "{name}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
    key = "" if access.api_key is None else ' -H "authorization: Bearer $BATON_API_KEY"'
    ca = "" if access.ca is None else f" --cacert {access.ca}"
    console.out(
        f"  curl{ca} {url}/chat/completions -H 'content-type: application/json'{key} -d '{body}'",
        highlight=False,
    )
    commands = ("chat", "status", "scale decode=2", "down")
    console.print("  " + " · ".join(f"baton {command}{option}" for command in commands), soft_wrap=True)
