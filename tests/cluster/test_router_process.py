"""`python -m router` as a process."""

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import httpx
import pytest

from protos import inference_pb2_grpc
from protos.worker_pb2 import ROLE_DECODE
from router.__main__ import parse_config
from tests.cluster.router_bench import Reply, token_request
from tests.cluster.scripted_worker import DEADLINE_S, ScriptedWorker

HEAVY = ("torch", "ray", "transformers", "engine", "worker", "deploy")


@asynccontextmanager
async def router_process(*options: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, dict[str, str]]]:
    """The process and its ready line; killed at the end if it still runs."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "router", *options, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(3 * DEADLINE_S):
            ready = json.loads(await process.stdout.readline())
        yield process, ready
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def ended(process: asyncio.subprocess.Process) -> int:
    async with asyncio.timeout(DEADLINE_S):
        return await process.wait()


def test_the_router_loads_nothing_heavy() -> None:
    code = f"import sys, router.__main__; print([m for m in {HEAVY!r} if m in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "[]"


async def health_becomes(address: str, status: int) -> None:
    async with httpx.AsyncClient() as client, asyncio.timeout(DEADLINE_S):
        while (await client.get(f"http://{address}/health")).status_code != status:
            continue


async def test_sigterm_finishes_running_streams_and_ends(tiny_model: Path) -> None:
    options = ("--model", str(tiny_model), "--stall-limit-s", "300", "--decode")
    async with (
        ScriptedWorker(ROLE_DECODE, "d0", model=tiny_model.name) as worker,
        router_process(*options, worker.address) as (process, ready),
        grpc.aio.insecure_channel(ready["grpc"]) as channel,
    ):
        await health_becomes(ready["http"], 200)
        reply = Reply()
        call = inference_pb2_grpc.InferenceStub(channel).Generate(token_request(max_tokens=2))
        leg = await worker.next_leg()
        leg.say_tokens(0, [100])
        reply.add(await call.read())
        process.send_signal(signal.SIGTERM)
        await health_becomes(ready["http"], 503)
        leg.say_tokens(1, [101])
        leg.say_finished()
        while (response := await call.read()) is not grpc.aio.EOF:
            reply.add(response)
        assert reply.token_ids == [100, 101]
        assert await ended(process) == 0


async def test_without_work_sigterm_ends_at_once(tiny_model: Path) -> None:
    async with router_process("--model", str(tiny_model), "--drain-limit-s", "1000") as (process, ready):
        assert ready["event"] == "ready"
        process.send_signal(signal.SIGTERM)
        assert await ended(process) == 0


def test_addresses_may_be_repeated_and_comma_separated(tiny_model: Path) -> None:
    config = parse_config(
        ["--model", str(tiny_model), "--prefill", "a:1", "--prefill", "b:2,c:3", "--decode", "d:4"]
    )
    assert config.prefill == ("a:1", "b:2", "c:3")
    assert config.decode == ("d:4",)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--stall-limit-s", "0"], "--stall-limit-s: Input should be greater than 0"),
        (["--grpc-port", "x"], "--grpc-port: Input should be a valid integer"),
        (["--no-such-option", "x"], "--no-such-option"),
        (["--model", "/no/such/folder"], "--model: "),
    ],
)
def test_a_wrong_option_is_one_clear_error(
    tiny_model: Path, capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_config(["--model", str(tiny_model), *options])
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


def test_help_tells_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_config(["--help"])
    help_text = capsys.readouterr().out
    for option in ("--model", "--prefill", "--decode", "--drain-limit-s", "--local-prefill-tokens"):
        assert option in help_text
