"""Who waits at the router, who goes to the workers, and who is refused at once."""

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Self

from router.cluster_view import Role, WorkerSnapshot
from router.errors import ErrorCode, RequestError
from router.fair_queue import OUTPUT_WEIGHT, Entry, FairQueue
from router.placement_cost import prefill_rate
from router.service_rate import ServiceRate

# Of a worker's room: long prompts may take the rest, so that short ones never wait behind them.
SHORT_SHARE = 0.25
# A prompt of this part of a worker's room is long.
LONG_PART = 1 / 16
# No prompt counts for more than this part of it: several are always on their way.
MAX_PART = 1 / 4
_MIN_RETRY_S, _MAX_RETRY_S = 1.0, 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionRules:
    """
    Attributes:
        max_expected_ttft_s: requests that would wait longer for their first token are refused.
        max_queued_requests: that wait in the router.
        max_inflight_prompt_tokens: that one worker which prefills has before it, sent by this router. The
            others wait here, where their order can still change.
    """

    max_expected_ttft_s: float = 60.0
    max_queued_requests: int = 1024
    max_inflight_prompt_tokens: int = 8192


@dataclass(frozen=True, slots=True)
class Capacity:
    """Of the workers that prefill.

    Attributes:
        waiting_tokens: that they have before them, whoever sent them.
    """

    num_workers: int
    tokens_per_s: float
    waiting_tokens: int

    @classmethod
    def of(cls, workers: tuple[WorkerSnapshot, ...]) -> "Capacity":
        """Decode workers count where there is no prefill worker."""
        open_ = [worker for worker in workers if not worker.draining]
        able = [worker for worker in open_ if worker.role is Role.PREFILL] or open_
        return cls(
            len(able),
            sum(prefill_rate(worker) for worker in able),
            sum(worker.waiting_prompt_tokens for worker in able),
        )


@dataclass(frozen=True, slots=True)
class Claim:
    """What asks to be let in.

    Attributes:
        key: whose request it is.
        priority: lower is earlier.
        tokens: of the prompt, that will be computed; at least 1.
    """

    key: str
    priority: int
    tokens: int


class Ticket:
    """A request that was let in. `leave` at its end, whatever that is."""

    def __init__(self, admission: "Admission", claim: Claim, charge: Callable[[str, float], None]) -> None:
        self._admission = admission
        self._claim = claim
        self._charge = charge
        self._is_before_first_token = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def generated(self, num_tokens: int) -> None:
        """Tokens came. With the first ones the prompt is off the workers' hands."""
        self._charge(self._claim.key, OUTPUT_WEIGHT * num_tokens)
        if self._is_before_first_token:
            self._is_before_first_token = False
            self._admission.free(self._claim.tokens, computed=self._claim.tokens)

    def leave(self) -> None:
        """The request is over. May be called again."""
        if self._is_before_first_token:
            self._is_before_first_token = False
            self._admission.free(self._claim.tokens, computed=0)


_Entry = Entry[asyncio.Future[None]]


class Admission:
    """Lets requests to the workers as these have room, and keeps or refuses the others.

    Nothing waits while no request is before its first token, or while there is no worker to wait for.

    Args:
        capacity: of the workers, now.
        on_refused: called with the reason of each refusal: "queue_full" or "expected_ttft".
        clock: seconds, only growing.
    """

    def __init__(
        self,
        rules: AdmissionRules,
        capacity: Callable[[], Capacity],
        on_refused: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rules = rules
        self._capacity = capacity
        self._on_refused = on_refused
        self._clock = clock
        self._queue: FairQueue[asyncio.Future[None]] = FairQueue(rules.max_queued_requests)
        # Of what was let in and has no token yet: what it takes of the room for long and for short prompts.
        self._taken = {True: 0.0, False: 0.0}
        self._inflight_tokens = 0
        self._rate = ServiceRate()

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    async def enter(self, claim: Claim) -> Ticket:
        """Returns when the request may go to the workers.

        Raises:
            RequestError: RESOURCE_EXHAUSTED, at once or when another request takes its place; with when to
                try again.
        """
        capacity, now_s = self._capacity(), self._clock()
        self._check_wait(claim, capacity, now_s)
        if not self._queue and self._has_room(capacity, self._is_long(claim.tokens)):
            # As nearly all come.
            self._queue.pass_by(claim.key, claim.tokens)
            self._take_room(claim.tokens)
            self._follow(capacity, now_s)
        else:
            await self._wait(claim, capacity, now_s)
        return Ticket(self, claim, self._queue.charge)

    async def _wait(self, claim: Claim, capacity: Capacity, now_s: float) -> None:
        is_long, item = self._is_long(claim.tokens), asyncio.get_running_loop().create_future()
        entry: _Entry = Entry(claim.key, claim.priority, claim.tokens, is_long, now_s, item)
        if (displaced := self._queue.push(entry)) is not None:
            self._displace(displaced, self._expected_ttft_s(claim, capacity, now_s))
        self._let_in(capacity, now_s)
        try:
            await entry.item
        except asyncio.CancelledError:
            self._queue.remove(entry)
            if not entry.item.cancelled() and entry.item.exception() is None:
                # It was let in, and is cancelled before it knows.
                self.free(entry.tokens, computed=0)
            raise

    def expected_ttft_s(self, claim: Claim) -> float:
        """What a request would wait now until its first token, seconds. inf: there is no worker."""
        return self._expected_ttft_s(claim, self._capacity(), self._clock())

    def advance(self) -> None:
        """The workers have changed."""
        if self._queue:
            self._let_in(self._capacity(), self._clock())

    def free(self, tokens: int, *, computed: int) -> None:
        """A request that was let in is no longer before its first token.

        Args:
            tokens: that it claimed.
            computed: prompt tokens.
        """
        self._taken[self._is_long(tokens)] -= self._takes(tokens)
        self._inflight_tokens -= tokens
        if computed:
            self._rate.served(self._clock(), computed)
        self.advance()

    def _is_long(self, tokens: int) -> bool:
        return tokens >= self._rules.max_inflight_prompt_tokens * LONG_PART

    def _takes(self, tokens: int) -> float:
        return min(tokens, self._rules.max_inflight_prompt_tokens * MAX_PART)

    def _has_room(self, capacity: Capacity, is_long: bool) -> bool:
        """For one more long prompt, or one more short. Without workers they all get their error, or wait as
        their limits say, where requests are placed.
        """
        share = 1 - SHORT_SHARE if is_long else SHORT_SHARE
        room = share * self._rules.max_inflight_prompt_tokens * capacity.num_workers
        taken = self._taken[is_long]
        return taken < room or taken == 0 or capacity.num_workers == 0

    def _take_room(self, tokens: int) -> None:
        self._taken[self._is_long(tokens)] += self._takes(tokens)
        self._inflight_tokens += tokens

    def _let_in(self, capacity: Capacity, now_s: float) -> None:
        tokens_per_s = capacity.tokens_per_s if capacity.num_workers else 1.0
        has_room = partial(self._has_room, capacity)
        while (entry := self._queue.pop(has_room, now_s, tokens_per_s)) is not None:
            if not entry.item.cancelled():
                self._take_room(entry.tokens)
                entry.item.set_result(None)
        self._follow(capacity, now_s)

    def _follow(self, capacity: Capacity, now_s: float) -> None:
        self._rate.follow(now_s, capacity.tokens_per_s, num_waiting=len(self._queue))

    def _check_wait(self, claim: Claim, capacity: Capacity, now_s: float) -> None:
        """A prompt that nothing is before is never refused, however long it takes."""
        limit_s = self._rules.max_expected_ttft_s
        if capacity.num_workers == 0 or self._tokens_before(claim, capacity) == 0:
            return
        expected_s = self._expected_ttft_s(claim, capacity, now_s)
        if expected_s > limit_s:
            self._on_refused("expected_ttft")
            raise _exhausted(
                f"the first token would come after {expected_s:.0f} s; the limit is {limit_s:g} s",
                expected_s - limit_s,
            )

    def _displace(self, entry: _Entry, expected_s: float) -> None:
        self._on_refused("queue_full")
        if not entry.item.done():
            full = f"{self._rules.max_queued_requests} requests wait already"
            # By then about half of them are gone.
            entry.item.set_exception(_exhausted(full, expected_s / 2))

    def _tokens_before(self, claim: Claim, capacity: Capacity) -> int:
        on_workers = max(capacity.waiting_tokens, self._inflight_tokens)
        return on_workers + self._queue.tokens_ahead(claim.key, claim.priority, claim.tokens)

    def _expected_ttft_s(self, claim: Claim, capacity: Capacity, now_s: float) -> float:
        if capacity.num_workers == 0:
            return math.inf
        wait_s = self._tokens_before(claim, capacity) / self._rate.tokens_per_s(now_s, capacity.tokens_per_s)
        return wait_s + claim.tokens * capacity.num_workers / capacity.tokens_per_s


def _exhausted(message: str, retry_after_s: float) -> RequestError:
    seconds = math.ceil(min(max(retry_after_s, _MIN_RETRY_S), _MAX_RETRY_S))
    return RequestError(ErrorCode.RESOURCE_EXHAUSTED, message, retry_after_s=seconds)
