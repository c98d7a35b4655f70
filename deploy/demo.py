"""One question through a whole cluster, and what became of it."""

import os

from rich.table import Table

from deploy import lifecycle
from deploy.client import ArrivalTimes, InferenceClient, chat_request
from deploy.client_access import ClientAccess
from deploy.cluster_config import parse_config
from deploy.cluster_state import ClusterFolder
from deploy.terminal import console, megabytes
from protos import inference_pb2

_MAX_TOKENS = 64


def run(model: str, prompt: str, limit_s: float) -> None:
    """Leaves no process behind, also when it fails or is interrupted.

    Raises:
        ClusterError: the cluster did not come up.
        grpc.RpcError: the request failed.
    """
    settings = {
        "model": model,
        # A small model's answer can turn on a rounding of bfloat16; in float32 it is the same everywhere.
        "worker": {"dtype": "float32"},
        "router": {"grpc_port": 0, "http_port": 0},
    }
    config = parse_config(settings, "demo")
    folder = ClusterFolder.of(f"demo-{os.getpid()}")
    with lifecycle.brought_up(config, folder, ClientAccess(), limit_s) as up:
        _ask(up.ready.grpc_address, prompt)
    console.print("[dim]All is down; no process is left.[/dim]")


def _ask(address: str, prompt: str) -> None:
    """Streams the answer and shows its figures."""
    sampling = inference_pb2.SamplingParams(temperature=0, max_tokens=_MAX_TOKENS)
    request = chat_request([inference_pb2.ChatMessage(role="user", content=prompt)], sampling)
    console.print(f"\n[bold cyan]you[/bold cyan]    {prompt}\n[bold green]model[/bold green]  ", end="")
    last = None
    with InferenceClient(address) as client:
        times = ArrivalTimes()
        for last in client.generate(request):
            times.add(last)
            console.out(last.text, end="", highlight=False)
    console.print("\n")
    if last is not None:
        console.print(_figures(last, times))


def _figures(last: inference_pb2.GenerateResponse, times: ArrivalTimes) -> Table:
    table = Table(show_header=False)
    for name, value in (
        ("time to first token (TTFT)", _milliseconds(times.ttft_s)),
        ("time between tokens (ITL), median", _milliseconds(times.itl_s)),
        ("prompt and answer", f"{last.usage.prompt_tokens} and {last.usage.completion_tokens} tokens"),
        ("prefilled by", last.served_by.prefill_worker),
        ("decoded by", last.served_by.decode_worker),
        ("KV handed over", f"{last.served_by.kv_bytes} bytes ({megabytes(last.served_by.kv_bytes)})"),
    ):
        table.add_row(name, value)
    return table


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f} ms"
