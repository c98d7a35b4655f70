"""The `baton` command."""

import contextlib
import json
import signal
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import grpc
import typer
from rich.markup import escape

from deploy import demo as demonstration
from deploy import lifecycle
from deploy.client import InferenceClient, chat_request
from deploy.client_access import AccessError, ClientAccess
from deploy.cluster_config import POOLS, ClusterConfig, ConfigError, load_config, parse_config, render_config
from deploy.cluster_state import ClusterFolder, ClusterState
from deploy.options import (
    DEFAULT_CLUSTER,
    ApiKey,
    Ca,
    Cert,
    Cluster,
    Key,
    MaxTokens,
    Router,
    Seed,
    Temperature,
)
from deploy.readiness import ClusterError, log_tail, serve_api, set_sizes
from deploy.router_api import RouterApi, RouterApiError, RouterRefused
from deploy.serve_api import ServeApiError
from deploy.terminal import (
    Progress,
    console,
    errors,
    explanation_table,
    pools_table,
    print_ready,
    workers_table,
)
from model_store import ModelStoreError
from protos import inference_pb2
from router.api_keys import KeyFileError

app = typer.Typer(
    name="baton",
    help="Serve a language model with prefill and decode on separate pools.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_READY_LIMIT_S = 900.0


@contextlib.contextmanager
def _errors_explained() -> Iterator[None]:
    """What a user can cause ends with its message, not with a traceback."""
    try:
        yield
    except (
        ClusterError,
        ConfigError,
        ModelStoreError,
        ServeApiError,
        RouterApiError,
        RouterRefused,
        AccessError,
        KeyFileError,
        ConnectionError,
    ) as error:
        errors.print("[red]error[/red]:", escape(str(error)), highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error
    except grpc.RpcError as error:
        # A call is both an error and the place where its status is.
        assert isinstance(error, grpc.Call)
        errors.print("[red]error[/red]:", escape(f"{error.code().name}: {error.details()}"), highlight=False)
        raise typer.Exit(1) from error


def _end_on_signals() -> None:
    """SIGTERM and a closed terminal end a command as Ctrl-C does: what it started is taken down."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))


def _cluster(name: str) -> tuple[ClusterFolder, ClusterState]:
    folder = ClusterFolder.of(name)
    state = folder.read()
    if state is None:
        raise ClusterError(f"no cluster {name!r} is up; `baton up` starts one")
    if state.session is not None and not state.session.members():
        raise ClusterError(
            f"cluster {name!r} has ended by itself; `baton down` cleans up. Its last words:\n"
            f"{log_tail(folder.log_file)}"
        )
    return folder, state


@app.command()
def up(
    model: Annotated[
        str | None,
        typer.Option(help="smollm2-135m (default), a local Hugging Face folder, a GGUF file or a hub id."),
    ] = None,
    prefill: Annotated[int | None, typer.Option(help="Prefill workers. Default: 1.", min=1)] = None,
    decode: Annotated[int | None, typer.Option(help="Decode workers. Default: 1.", min=1)] = None,
    config: Annotated[
        Path | None, typer.Option(help="YAML file; `baton config` prints one. Options here win.")
    ] = None,
    address: Annotated[
        str | None, typer.Option(help="Join this Ray cluster, host:port. Default: start one here.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="auto (default), float32 or bfloat16.")] = None,
    kv_dtype: Annotated[
        str | None, typer.Option(help="Of the KV cache: auto (default: as dtype), int8 or fp8.")
    ] = None,
    kv_transport: Annotated[
        str | None,
        typer.Option(
            help="How KV goes: auto (default: ipc or shm on one machine, else grpc), nccl, gloo, nixl ..."
        ),
    ] = None,
    http_port: Annotated[int | None, typer.Option(help="Of the OpenAI door. Default: 8000; 0: any.")] = None,
    grpc_port: Annotated[int | None, typer.Option(help="Of the gRPC door. Default: 50051; 0: any.")] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Listen beyond loopback with neither keys nor TLS.")
    ] = False,
    block: Annotated[
        bool, typer.Option("--block", help="Stay, and take the cluster down at Ctrl-C.")
    ] = False,
    limit_s: Annotated[float, typer.Option("--timeout", help="Seconds to wait for it.")] = _READY_LIMIT_S,
    api_key: ApiKey = None,
    cert: Cert = None,
    key: Key = None,
    cluster: Cluster = DEFAULT_CLUSTER,
) -> None:
    """Bring a cluster up and wait until it takes requests.

    Without --address, Ray is started on this machine, reachable from it alone. The cluster stays up
    after the command returns; `baton down` takes it down.
    """
    _end_on_signals()
    with _errors_explained():
        settings = _override(
            load_config(config) if config else ClusterConfig(),
            {
                "model": model,
                "ray_address": address,
                "pools": {"prefill": {"workers": prefill}, "decode": {"workers": decode}},
                "worker": {
                    "dtype": dtype,
                    "kv_dtype": kv_dtype,
                    "kv_transport": kv_transport,
                    "insecure": insecure or None,
                },
                "router": {"http_port": http_port, "grpc_port": grpc_port, "insecure": insecure or None},
            },
        )
        folder = ClusterFolder.of(cluster)
        access = ClientAccess(api_key, cert=cert, key=key)
        with lifecycle.brought_up(settings, folder, access, limit_s) as cluster_up:
            print_ready(cluster_up.ready, "" if cluster == DEFAULT_CLUSTER else f" --cluster {cluster}")
            if block:
                cluster_up.stay()
            else:
                cluster_up.keep()


def _override(config: ClusterConfig, options: dict[str, object]) -> ClusterConfig:
    """The configuration with every option that was given (is not None) in its place."""
    merged = _merge(config.model_dump(exclude_unset=True), options)
    return parse_config(merged, "options")


def _merge(content: dict[str, object], options: dict[str, object]) -> dict[str, object]:
    merged = dict(content)
    for name, value in options.items():
        if isinstance(value, dict):
            below = merged.get(name)
            merged[name] = _merge(below if isinstance(below, dict) else {}, value)
        elif value is not None:
            merged[name] = value
    return merged


@app.command()
def down(cluster: Cluster = DEFAULT_CLUSTER) -> None:
    """Take down what `up` brought up.

    A local cluster ends at once. On a Ray that was joined, requests that run are finished first.
    """
    with _errors_explained():
        folder = ClusterFolder.of(cluster)
        state = folder.read()
        if state is None:
            raise ClusterError(f"no cluster {cluster!r} is up")
        with Progress("taking the cluster down"):
            lifecycle.take_down(state, folder)
        console.print("down")


@app.command()
def status(
    as_json: Annotated[bool, typer.Option("--json", help="As data.")] = False,
    api_key: ApiKey = None,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
    cluster: Cluster = DEFAULT_CLUSTER,
) -> None:
    """Show the pools, their load and their KV use."""
    with _errors_explained():
        _, state = _cluster(cluster)
        application = serve_api(state).status()
        if application is None:
            raise ClusterError("the cluster is still starting")
        access = ClientAccess(api_key, ca, cert, key).within(state)
        workers = [] if state.http_address is None else RouterApi(state.http_address, access).workers()
        if as_json:
            doors = {"grpc_address": state.grpc_address, "http_address": state.http_address}
            print(json.dumps(doors | asdict(application) | {"workers": [asdict(each) for each in workers]}))
            return
        url = f"{access.scheme}://{state.http_address}/v1"
        console.print(f"{state.model_name}: gRPC {state.grpc_address}, OpenAI {url}")
        console.print(pools_table(application))
        console.print(workers_table(workers))


@app.command()
def explain(
    prompt: Annotated[str | None, typer.Argument(help="Where would it go now?")] = None,
    request: Annotated[
        str | None, typer.Option(help="Id of one of the last 1000 requests: where did it go?")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text; no chat template.")] = False,
    max_tokens: MaxTokens = None,
    http: Annotated[
        str | None, typer.Option(help="host:port of an HTTP door. Default: that of the cluster.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As data.")] = False,
    api_key: ApiKey = None,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
    cluster: Cluster = DEFAULT_CLUSTER,
) -> None:
    """Show which workers a request is placed on, and what the others would have cost."""
    with _errors_explained():
        router = _router_api(http, ClientAccess(api_key, ca, cert, key), cluster)
        if (prompt is None) == (request is None):
            raise RouterApiError("give either a prompt or --request")
        explained = (
            router.explain_past(request or "")
            if prompt is None
            else [router.explain(_body(prompt, raw, max_tokens))]
        )
        if as_json:
            print(json.dumps([asdict(each) for each in explained]))
            return
        for each in explained:
            console.print(explanation_table(each))


def _router_api(http: str | None, access: ClientAccess, cluster: str) -> RouterApi:
    if http is not None:
        return RouterApi(http, access)
    _, state = _cluster(cluster)
    if state.http_address is None:
        raise ClusterError("no router runs at the moment")
    return RouterApi(state.http_address, access.within(state))


def _body(prompt: str, raw: bool, max_tokens: int | None) -> dict[str, object]:
    text: dict[str, object] = (
        {"prompt": prompt} if raw else {"messages": [{"role": "user", "content": prompt}]}
    )
    return text if max_tokens is None else {**text, "max_tokens": max_tokens}


@app.command()
def scale(
    pools: Annotated[list[str], typer.Argument(help="prefill=N, decode=M, or both.", metavar="POOL=N...")],
    limit_s: Annotated[float, typer.Option("--timeout", help="Seconds to wait for it.")] = _READY_LIMIT_S,
    cluster: Cluster = DEFAULT_CLUSTER,
) -> None:
    """Change the number of workers and wait until it is so.

    Workers that leave finish what they have first.
    """
    with _errors_explained():
        targets = dict(map(_target, pools))
        _, state = _cluster(cluster)
        with Progress("scaling") as progress:
            set_sizes(state, targets, limit_s, progress.show)
        console.print("done: " + ", ".join(f"{pool}={count}" for pool, count in targets.items()))


def _target(text: str) -> tuple[str, int]:
    pool, _, count = text.partition("=")
    if pool not in POOLS or not count.isdecimal():
        raise ClusterError(f"{text!r}: expected prefill=N or decode=N")
    return pool, int(count)


@app.command()
def generate(
    prompt: str,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    seed: Seed = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text; no chat template.")] = False,
    router: Router = None,
    api_key: ApiKey = None,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
    cluster: Cluster = DEFAULT_CLUSTER,
) -> None:
    """Answer one prompt, streaming."""
    with _errors_explained(), _client(router, ClientAccess(api_key, ca, cert, key), cluster) as client:
        sampling = _sampling(max_tokens, temperature, seed)
        request = chat_request([inference_pb2.ChatMessage(role="user", content=prompt)], sampling)
        if raw:
            request = inference_pb2.GenerateRequest(text=prompt, sampling=sampling)
        _print_stream(client, request)


@app.command()
def chat(
    system: Annotated[str | None, typer.Option(help="What the model is told first.")] = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    seed: Seed = None,
    router: Router = None,
    api_key: ApiKey = None,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
    cluster: Cluster = DEFAULT_CLUSTER,
) -> None:
    """Talk to the model. Ctrl-C stops an answer, Ctrl-D ends the conversation."""
    with _errors_explained(), _client(router, ClientAccess(api_key, ca, cert, key), cluster) as client:
        messages = [] if system is None else [inference_pb2.ChatMessage(role="system", content=system)]
        sampling = _sampling(max_tokens, temperature, seed)
        console.print("[dim]Ctrl-C stops an answer, Ctrl-D ends the conversation.[/dim]")
        while (question := _ask()) is not None:
            messages.append(inference_pb2.ChatMessage(role="user", content=question))
            answer = _print_stream(client, chat_request(messages, sampling))
            messages.append(inference_pb2.ChatMessage(role="assistant", content=answer))


def _ask() -> str | None:
    """None: the conversation is over."""
    while True:
        try:
            question = console.input("[bold cyan]you[/bold cyan]  ").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return None
        if question:
            return question


def _print_stream(client: InferenceClient, request: inference_pb2.GenerateRequest) -> str:
    """Prints the answer as it comes and returns it, or what of it came before Ctrl-C."""
    text = ""
    try:
        for response in client.generate(request):
            console.out(response.text, end="", highlight=False)
            text += response.text
    except KeyboardInterrupt:
        console.print(" [dim](stopped)[/dim]", end="")
    console.print()
    return text


def _client(router: str | None, access: ClientAccess, cluster: str) -> InferenceClient:
    if router is not None:
        return InferenceClient(router, access)
    _, state = _cluster(cluster)
    if state.grpc_address is None:
        raise ClusterError("no router runs at the moment")
    return InferenceClient(state.grpc_address, access.within(state))


def _sampling(
    max_tokens: int | None, temperature: float | None, seed: int | None
) -> inference_pb2.SamplingParams:
    return inference_pb2.SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)


@app.command()
def demo(
    model: Annotated[str, typer.Option(help="As in `up`.")] = "smollm2-135m",
    prompt: Annotated[str, typer.Option(help="What to ask.")] = "What is the capital of France?",
    limit_s: Annotated[float, typer.Option("--timeout", help="Seconds to wait for it.")] = _READY_LIMIT_S,
) -> None:
    """Bring a cluster up, ask one question, show what happened, take all down."""
    _end_on_signals()
    with _errors_explained():
        demonstration.run(model, prompt, limit_s)


@app.command()
def certs(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where the files go.")],
    host: Annotated[
        list[str] | None,
        typer.Option(help="Name or address of a router or worker, beside localhost. May be repeated."),
    ] = None,
) -> None:
    """Make a CA for development, and certificates for router, workers and clients.

    A CA that is in DIR already is kept. docs/security.md says which file goes where.
    """
    with _errors_explained():
        from security.development_ca import make_certificates

        try:
            make_certificates(folder, host or ())
        except (OSError, ValueError) as error:
            raise AccessError(f"{folder}: {error}") from error
        for path in sorted(folder.iterdir()):
            console.print(path, highlight=False)


@app.command()
def config() -> None:
    """Print a configuration file with every knob, what it does and its default."""
    print(render_config(ClusterConfig()), end="")


if __name__ == "__main__":
    app()
