"""What the router learns of its workers, where it sends requests for it, and how it explains that."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from deploy.cli import app
from protos.worker_pb2 import ROLE_DECODE, ROLE_PREFILL, LoadReport
from router.block_names import block_names
from router.router_server import RouterServer
from tests.cluster.router_bench import Reply, both_legs, generating, running_router, token_request, until
from tests.cluster.scripted_worker import BLOCK_SIZE, DEADLINE_S, ScriptedSession, ScriptedWorker

PROMPT = tuple(range(5, 69))
NAMES = list(block_names(PROMPT, BLOCK_SIZE, ""))


@dataclass(frozen=True)
class Pools:
    """Two prefill and two decode workers, by their ids."""

    router: RouterServer
    http: httpx.AsyncClient
    workers: dict[str, ScriptedWorker]
    sessions: dict[str, ScriptedSession]

    async def has_heard(self, worker_id: str) -> None:
        """Returns when the router has heard all that the worker said: its load, said now, comes last."""
        worker = self.workers[worker_id]
        load = LoadReport()
        load.CopyFrom(worker.load)
        load.generated_tokens += 1
        worker.report(load)
        async with asyncio.timeout(DEADLINE_S):
            seen = 0
            while await self.generated(worker_id) != load.generated_tokens:
                seen = await self.router.fleet.next_change(seen)

    async def generated(self, worker_id: str) -> int:
        lines = (await self.http.get("/workers")).json()
        return next(line["generated_tokens"] for line in lines if line["worker_id"] == worker_id)

    async def explain(self, **body: object) -> dict:
        request = {"prompt": list(PROMPT), "max_tokens": 8, **body}
        return (await self.http.post("/explain", json=request)).raise_for_status().json()

    async def choice(self, **body: object) -> tuple[str, str]:
        best = (await self.explain(**body))["candidates"][0]
        return best["prefill_worker"], best["decode_worker"]

    async def serve(self, request_id: str = "") -> Reply:
        """A request, answered by the pair that it is explained to go to."""
        prefill, decode = await self.choice()
        request = token_request(PROMPT, max_tokens=2)
        request.request_id = request_id
        async with generating(self.router, request) as task:
            sending, receiving = await both_legs(self.workers[prefill], self.workers[decode])
            sending.say_tokens(0, [5])
            sending.say_prefilled(kv_bytes=64_000_000, transfer_s=3.2)
            await self.has_heard(prefill)
            receiving.say_admitted()
            receiving.say_tokens(0, [5, 6])
            receiving.say_finished()
            return await task


@pytest.fixture
async def pools(tiny_model: Path) -> AsyncIterator[Pools]:
    async with AsyncExitStack() as stack:
        workers = {
            name: await stack.enter_async_context(ScriptedWorker(role, name))
            for name, role in (
                ("p0", ROLE_PREFILL),
                ("p1", ROLE_PREFILL),
                ("d0", ROLE_DECODE),
                ("d1", ROLE_DECODE),
            )
        }
        for worker in workers.values():
            # One of a large model, whose KV takes as long as its computation.
            worker.description.wire_token_bytes = 50_000
        in_role = {role: [w for w in workers.values() if w.description.role == role] for role in (1, 2)}
        router = await stack.enter_async_context(
            running_router(tiny_model, prefill=in_role[ROLE_PREFILL], decode=in_role[ROLE_DECODE])
        )
        http = await stack.enter_async_context(
            httpx.AsyncClient(base_url=f"http://{router.http_address}", timeout=DEADLINE_S)
        )
        sessions = {name: await worker.next_session() for name, worker in workers.items()}
        yield Pools(router, http, workers, sessions)


async def test_a_prefix_that_a_worker_tells_of_attracts_its_requests(pools: Pools) -> None:
    assert await pools.choice() == ("p0", "d0")
    pools.sessions["p1"].say_cache(0, NAMES[:2], is_snapshot=True)
    pools.sessions["d1"].say_cache(0, NAMES[:1], is_snapshot=True)
    for worker in ("p1", "d1"):
        await pools.has_heard(worker)
    assert await pools.choice() == ("p1", "d1")
    assert await pools.choice(cache_salt="another's") == ("p0", "d0")


async def test_a_gap_in_what_a_worker_tells_is_asked_about(pools: Pools) -> None:
    session = pools.sessions["p1"]
    session.say_cache(0, NAMES[:2], is_snapshot=True)
    session.say_cache(2, NAMES[2:])
    await session.cache_query_arrives()
    assert await pools.choice() == ("p0", "d0")
    session.say_cache(3, NAMES[:3], is_snapshot=True)
    await pools.has_heard("p1")
    assert await pools.choice() == ("p1", "d0")


async def test_what_a_worker_had_is_forgotten_with_its_session(pools: Pools) -> None:
    pools.sessions["p1"].say_cache(0, NAMES, is_snapshot=True)
    await pools.has_heard("p1")
    assert pools.router.fleet.observations.prefixes.num_names == len(NAMES)
    await pools.workers["p1"].die()
    await until(pools.router, lambda workers: len(workers) == 3)
    assert pools.router.fleet.observations.prefixes.num_names == 0


async def test_a_link_is_judged_by_its_hand_offs(pools: Pools) -> None:
    before = (await pools.explain())["candidates"][0]["transfer_s"]
    served_by = (await pools.serve()).last.served_by
    after = {
        (each["prefill_worker"], each["decode_worker"]): each["transfer_s"]
        for each in (await pools.explain())["candidates"]
    }
    assert after[served_by.prefill_worker, served_by.decode_worker] > 10 * before


async def test_requests_that_come_at_once_are_spread(pools: Pools) -> None:
    choices = set()
    requests = [token_request(PROMPT, max_tokens=2) for _ in range(4)]
    async with AsyncExitStack() as stack:
        for request in requests:
            await stack.enter_async_context(generating(pools.router, request))
            legs = [worker.submitted for worker in pools.workers.values()]
            async with asyncio.timeout(DEADLINE_S):
                while sum(queue.qsize() for queue in legs) < 2:
                    await pools.http.get("/health")
            choices.add(tuple(name for name, worker in pools.workers.items() if worker.submitted.qsize()))
            for queue in legs:
                while not queue.empty():
                    queue.get_nowait()
    assert len({choice[0] for choice in choices}) == len({choice[1] for choice in choices}) == 2


async def test_an_explanation_has_every_pair_with_the_terms_of_its_cost(pools: Pools) -> None:
    explanation = await pools.explain()
    assert explanation["num_tokens"] == len(PROMPT)
    assert explanation["decided_unix_s"] is None
    assert explanation["expected_ttft_s"] > 0
    candidates = explanation["candidates"]
    pairs = {(each["prefill_worker"], each["decode_worker"]) for each in candidates}
    assert pairs == {(p, d) for p in ("p0", "p1") for d in ("d0", "d1")}
    for each in candidates:
        terms = ("wait_s", "prefill_s", "transfer_s", "decode_s", "disturbance_s")
        assert each["cost_s"] == pytest.approx(sum(each[term] for term in terms))
        assert each["kind"] == "pair"
    assert [each["cost_s"] for each in candidates] == sorted(each["cost_s"] for each in candidates)


async def test_explaining_sends_nothing_to_a_worker(pools: Pools) -> None:
    await pools.explain()
    await pools.explain(messages=[{"role": "user", "content": "Why?"}])
    for worker in pools.workers:
        await pools.has_heard(worker)
    assert all(worker.submitted.empty() for worker in pools.workers.values())


async def test_one_token_is_explained_as_one_workers(pools: Pools) -> None:
    explanation = await pools.explain(max_tokens=1)
    assert {each["kind"] for each in explanation["candidates"]} == {"prefill_alone"}


async def test_where_a_request_went_is_remembered(pools: Pools) -> None:
    reply = await pools.serve("why-there")
    (explanation,) = (await pools.http.get("/explain/why-there")).json()
    best = explanation["candidates"][0]
    assert best["prefill_worker"] == reply.last.served_by.prefill_worker
    assert best["decode_worker"] == reply.last.served_by.decode_worker
    assert explanation["decided_unix_s"] > 0


async def test_a_request_that_nobody_remembers_is_not_found(pools: Pools) -> None:
    response = await pools.http.get("/explain/unknown")
    assert response.status_code == 404 and response.json()["error"]["code"] == "not_found"


@pytest.mark.parametrize("body", [{"prompt": []}, {"messages": []}, {}, {"prompt": [5], "max_tokens": 0}])
async def test_a_request_that_is_wrong_is_not_explained(pools: Pools, body: dict) -> None:
    response = await pools.http.post("/explain", json=body)
    assert response.status_code == 400 and response.json()["error"]["param"]


async def test_placements_are_counted_by_kind(pools: Pools) -> None:
    await pools.serve()
    metrics = (await pools.http.get("/metrics")).text
    assert 'baton_placements_total{kind="pair"} 1.0' in metrics


async def test_what_was_sent_counts_until_it_is_computed(pools: Pools) -> None:
    for max_tokens, names in ((8, ("p0", "d0")), (1, ("p0", "p0"))):
        request = token_request(PROMPT, max_tokens=max_tokens)
        async with generating(pools.router, request):
            legs = [await pools.workers[name].next_leg() for name in dict.fromkeys(names)]
            (waiting,) = (
                each.waiting_prompt_tokens
                for each in pools.router.fleet.snapshot()
                if each.worker_id == names[0]
            )
            assert waiting == len(PROMPT)
            for leg in legs:
                leg.say_tokens(0, [5])
            await pools.has_heard(names[0])


@pytest.mark.parametrize("question", [["Where to?", "--raw"], ["Where to?"], ["--request", "why-there"]])
async def test_baton_explain_shows_the_choice(pools: Pools, question: list[str]) -> None:
    await pools.serve("why-there")
    command = ["explain", *question, "--json", "--http", pools.router.http_address]
    ran = await asyncio.to_thread(CliRunner().invoke, app, command)
    assert ran.exit_code == 0, ran.output
    (explanation,) = json.loads(ran.stdout)
    assert len(explanation["candidates"]) == 4
    assert (await asyncio.to_thread(CliRunner().invoke, app, command[:-3] + command[-2:])).exit_code == 0


async def test_baton_explain_says_what_is_wrong(pools: Pools) -> None:
    command = ["explain", "--request", "unknown", "--http", pools.router.http_address]
    ran = await asyncio.to_thread(CliRunner().invoke, app, command)
    assert ran.exit_code == 1 and "not among the last" in ran.stderr
