"""A prefill and a decode worker that answer from a script: what a router costs is all that is left.

`python -m bench.scripted_worker --step-ms 20` prints {"prefill": address, "decode": address}.
"""

import worker  # noqa: F401  gRPC set up as in workers, before it is imported

# isort: split
import argparse
import asyncio
import json
from collections.abc import AsyncIterator

import grpc
import uvloop

from protos import PROTOCOL_VERSION, kv_pb2, worker_pb2, worker_pb2_grpc
from protos.inference_pb2 import FINISH_REASON_LENGTH

# Tokens that are words, in a vocabulary of any size that a language model has.
FIRST_TOKEN, NUM_TOKENS = 1000, 3000


class Running:
    """A sequence in the script of the decode worker."""

    def __init__(self, submit: worker_pb2.Submit) -> None:
        self.attempt = submit.attempt
        self.max_tokens = submit.sampling.max_tokens
        self.index = 0

    def next_tokens(self) -> worker_pb2.SequenceTokens:
        token = FIRST_TOKEN + (self.attempt.number * 7 + self.index * 13) % NUM_TOKENS
        said = worker_pb2.SequenceTokens(attempt=self.attempt, index=self.index, token_ids=[token])
        self.index += 1
        return said


class Session:
    """One router's. Every step gives each of its sequences a token."""

    def __init__(self) -> None:
        self.outbox: asyncio.Queue[worker_pb2.WorkerMessage] = asyncio.Queue()
        self._running: dict[int, Running] = {}
        self._steps = 0

    def submit(self, submit: worker_pb2.Submit) -> None:
        """The first token comes at once, as if the prompt had cost nothing."""
        sequence = Running(submit)
        event = worker_pb2.StepEvent(tokens=[sequence.next_tokens()])
        if submit.WhichOneof("leg") == "prefill":
            event.prefilled.add(attempt=submit.attempt, kv_bytes=1 << 20, transfer_s=0.001)
        else:
            event.admitted.add(attempt=submit.attempt, kv_bytes=1 << 20)
            self._running[submit.attempt.number] = sequence
        self._say(event)

    def cancel(self, number: int) -> None:
        self._running.pop(number, None)

    def step(self) -> None:
        event = worker_pb2.StepEvent()
        for sequence in list(self._running.values()):
            event.tokens.append(sequence.next_tokens())
            if sequence.index == sequence.max_tokens:
                event.finished.add(attempt=sequence.attempt, finish_reason=FINISH_REASON_LENGTH)
                del self._running[sequence.attempt.number]
        if event.tokens:
            self._say(event)

    def _say(self, event: worker_pb2.StepEvent) -> None:
        event.step = self._steps
        self._steps += 1
        self.outbox.put_nowait(worker_pb2.WorkerMessage(step=event))


class ScriptedWorker(worker_pb2_grpc.WorkerServicer):
    def __init__(self, role: worker_pb2.Role, worker_id: str, model: str, step_s: float) -> None:
        self._step_s = step_s
        self._description = worker_pb2.WorkerDescription(
            protocol_version=PROTOCOL_VERSION,
            worker_id=worker_id,
            epoch=1,
            role=role,
            model=model,
            layout=kv_pb2.KvLayout(model_fingerprint="script", dtype="bfloat16", block_size=16),
            wire_dtype="bfloat16",
            accepted_dtypes=["bfloat16"],
            max_model_len=8192,
            num_blocks=1 << 20,
        )
        self._load = worker_pb2.LoadReport(
            num_blocks=1 << 20, free_blocks=1 << 20, step_s=step_s, prefill_tokens_per_s=1e6
        )

    async def Connect(
        self, request_iterator: AsyncIterator[worker_pb2.RouterMessage], context: grpc.aio.ServicerContext
    ) -> None:
        await anext(aiter(request_iterator))
        session = Session()
        await context.write(worker_pb2.WorkerMessage(description=self._description))
        await context.write(worker_pb2.WorkerMessage(cache=worker_pb2.CacheEvent(is_snapshot=True)))
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._write(session, context)),
                group.create_task(self._step(session)),
                group.create_task(self._beat(session)),
            ]
            async for message in request_iterator:
                match message.WhichOneof("message"):
                    case "submit":
                        session.submit(message.submit)
                    case "cancel":
                        session.cancel(message.cancel.attempt.number)
            for task in tasks:
                task.cancel()

    async def _write(self, session: Session, context: grpc.aio.ServicerContext) -> None:
        while True:
            await context.write(await session.outbox.get())

    async def _beat(self, session: Session) -> None:
        while True:
            session.outbox.put_nowait(worker_pb2.WorkerMessage(load=self._load))
            await asyncio.sleep(0.25)

    async def _step(self, session: Session) -> None:
        """Steps at fixed moments, as long as it keeps up."""
        loop = asyncio.get_running_loop()
        next_s = loop.time()
        while True:
            next_s = max(next_s + self._step_s, loop.time())
            await asyncio.sleep(next_s - loop.time())
            session.step()


async def serve(model: str, step_s: float) -> None:
    addresses = {}
    servers = []
    for name, role in (("prefill", worker_pb2.ROLE_PREFILL), ("decode", worker_pb2.ROLE_DECODE)):
        server = grpc.aio.server()
        worker_pb2_grpc.add_WorkerServicer_to_server(ScriptedWorker(role, f"{name}-0", model, step_s), server)
        addresses[name] = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        servers.append(server)
    print(json.dumps(addresses), flush=True)
    await servers[0].wait_for_termination()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, help="The name that the workers say they serve.")
    parser.add_argument("--step-ms", type=float, required=True, help="Between two tokens of a sequence.")
    options = parser.parse_args()
    uvloop.run(serve(options.model, options.step_ms / 1e3))


if __name__ == "__main__":
    main()
