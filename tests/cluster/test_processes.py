"""Processes that are killed, told to leave, or started wrongly."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import grpc
import httpx
import pytest
from openai import AsyncOpenAI

from bench.processes import ENVIRONMENT, ClusterProcesses, running_cluster
from protos import inference_pb2, inference_pb2_grpc
from tests.cluster.local_cluster import token_request
from tests.engine.engines import prompt_of
from tests.reference import NearTies, Reference

WORKER_OPTIONS = ["--dtype", "float32", "--kv-cache-bytes", str(64 << 20)]


@pytest.fixture
def cluster(tiny_model: Path, tmp_path: Path):
    with running_cluster(tiny_model, tmp_path, prefill=2, decode=2, worker_options=WORKER_OPTIONS) as running:
        yield running


class Stream:
    """A request that runs; `started` is set with its first token."""

    def __init__(
        self, stub: inference_pb2_grpc.InferenceStub, request: inference_pb2.GenerateRequest
    ) -> None:
        self.token_ids: list[int] = []
        self.served_by = inference_pb2.ServedBy()
        self.started = asyncio.Event()
        self.task = asyncio.create_task(self._read(stub.Generate(request, timeout=120)))

    async def _read(self, call) -> None:
        try:
            async for response in call:
                self.token_ids += response.token_ids
                if response.HasField("served_by"):
                    self.served_by = response.served_by
                self.started.set()
        finally:
            self.started.set()

    async def error(self) -> grpc.aio.AioRpcError | None:
        try:
            await self.task
        except grpc.aio.AioRpcError as error:
            return error
        return None


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_killing_a_worker_disturbs_no_stream(cluster: ClusterProcesses, tiny_model: Path, role: str):
    """Conformance 13 and 14: eight streams have their whole text, whoever wrote it."""
    async with grpc.aio.insecure_channel(cluster.router.grpc) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        requests = [token_request(prompt_of(40, seed=n), 600, ignore_eos=True) for n in range(8)]
        streams = [Stream(stub, request) for request in requests]
        for stream in streams:
            await stream.started.wait()
        getattr(cluster, role)[0].kill()
        assert [await stream.error() for stream in streams] == [None] * 8
        reference, ties = Reference(tiny_model), NearTies(2)
        for n, stream in enumerate(streams):
            ties.check(stream.token_ids, reference.greedy(prompt_of(40, seed=n), 600, ignore_eos=True))
        assert role == "prefill" or all(s.served_by.decode_worker != "decode-0" for s in streams)
        after = Stream(stub, token_request(prompt_of(10), 5))
        assert await after.error() is None


async def test_sixteen_openai_streams_at_once_are_each_served_by_two_workers(cluster: ClusterProcesses):
    address = cluster.router.ready["http"]
    async with AsyncOpenAI(base_url=f"http://{address}/v1", api_key="unused") as client:
        (model,) = (await client.models.list()).data

        async def chat(number: int) -> str:
            stream = await client.chat.completions.create(
                model=model.id,
                messages=[{"role": "user", "content": f"Count to {number}."}],
                max_tokens=30,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        texts = await asyncio.gather(*(chat(number) for number in range(16)))
    assert all(texts)
    async with httpx.AsyncClient(base_url=f"http://{address}") as http:
        while True:
            workers = {worker["worker_id"]: worker for worker in (await http.get("/workers")).json()}
            generated = {name: worker["generated_tokens"] for name, worker in workers.items()}
            if sum(generated.values()) == 16 * 30:
                break
    # Each first token is a prefill worker's, all others are decode workers'.
    assert generated["prefill-0"] + generated["prefill-1"] == 16
    assert all(generated.values())
    for name in ("decode-0", "decode-1"):
        assert workers[name]["computed_prompt_tokens"] == 0


async def test_sigterm_finishes_what_runs_then_ends(cluster: ClusterProcesses):
    async with grpc.aio.insecure_channel(cluster.router.grpc) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        streams = [Stream(stub, token_request(prompt_of(40), 1000, ignore_eos=True)) for _ in range(4)]
        for stream in streams:
            await stream.started.wait()
        for process in (*cluster.workers, cluster.router):
            process.signal(signal.SIGTERM)
        for stream in streams:
            assert await stream.error() is None
            assert len(stream.token_ids) == 1000
    for process in (*cluster.workers, cluster.router):
        assert await asyncio.to_thread(process.wait) == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--model", "no-such-model"], "no-such-model"),
        (["--model", "{empty}"], "config.json"),
        (["--model", "{model}", "--port", "70000"], "--port"),
        (["--model", "{model}", "--dtype", "int3"], "--dtype"),
        (["--model", "{model}", "--max-model-len", "100000"], "max_model_len"),
        (["--model", "{model}", "--kv-cache-bytes", "10"], "kv_cache_bytes"),
        (["--model", "{model}", "--device", "abacus"], "device"),
    ],
)
def test_a_wrong_option_is_one_clear_line(tiny_model: Path, tmp_path: Path, options: list[str], said: str):
    filled = [option.format(model=tiny_model, empty=tmp_path) for option in options]
    run = subprocess.run(
        [sys.executable, "-m", "decode_worker", *filled],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, **ENVIRONMENT},
    )
    assert run.returncode != 0
    assert said in run.stderr
    assert "Traceback" not in run.stderr
