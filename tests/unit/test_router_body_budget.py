"""The bytes of all requests together are bounded, and given back when they are over."""

import asyncio

import pytest

from router.body_budget import BodyBudget, HttpBodies
from router.errors import ErrorCode, RequestError


def test_what_is_held_is_given_back() -> None:
    budget = BodyBudget(100)
    for _ in range(3):
        budget.take(60)
        budget.take(40)
        with pytest.raises(RequestError) as caught:
            budget.take(1)
        assert caught.value.code is ErrorCode.RESOURCE_EXHAUSTED and caught.value.retry_after_s
        budget.give(40)
        budget.give(60)


def test_what_is_refused_takes_nothing() -> None:
    budget = BodyBudget(100)
    with pytest.raises(RequestError):
        budget.take(101)
    budget.take(100)


class Exchange:
    """One request of two chunks to an application that reads it and answers when it may."""

    def __init__(self, budget: BodyBudget, num_bytes: int) -> None:
        self._chunks = [bytes(num_bytes // 2), bytes(num_bytes - num_bytes // 2)]
        self.may_end = asyncio.Event()
        self.has_read = asyncio.Event()
        self.task = asyncio.create_task(HttpBodies(self._app, budget)({}, self._receive, self._send))

    async def _app(self, scope, receive, send) -> None:
        while (await receive())["more_body"]:
            pass
        self.has_read.set()
        await self.may_end.wait()

    async def _receive(self) -> dict:
        return {"body": self._chunks.pop(0), "more_body": bool(self._chunks)}

    async def _send(self, message) -> None:
        raise AssertionError


async def test_a_body_counts_until_its_request_is_over() -> None:
    budget = BodyBudget(100)
    first = Exchange(budget, 80)
    await first.has_read.wait()
    with pytest.raises(RequestError):
        await Exchange(budget, 30).task
    first.may_end.set()
    await first.task
    third = Exchange(budget, 100)
    await third.has_read.wait()
    third.task.cancel()
    await asyncio.wait({third.task})
    budget.take(100)
