"""Which workers a request goes to: a pure decision over a snapshot of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from router.cluster_view import Role, WorkerSnapshot
from router.placement_cost import Cost, Need, alone_cost, has_room, pair_cost, uncached

# A larger pool is not compared as a whole: two of it at random, and whoever has the longest prefix. Two
# choices are nearly as good as all (Mitzenmacher, 2001), and several routers do not all run to the same one.
LARGE_POOL = 8
# Of a decision, what is remembered: the cheapest.
SHOWN_CANDIDATES = 8


@dataclass(frozen=True, slots=True)
class Pair:
    """Prefill on one worker, hand off, decode on the other.

    Attributes:
        cached_tokens: of the request, that the worker which prefills is taken to have.
    """

    prefill: WorkerSnapshot
    decode: WorkerSnapshot
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Alone:
    """Prefill and decode on the one worker. `cached_tokens`: as of a pair."""

    worker: WorkerSnapshot
    cached_tokens: int


Placement = Pair | Alone
PLACEMENT_KINDS = ("pair", *(f"{role.value}_alone" for role in Role))


def kind_of(placement: Placement) -> str:
    """A label, one of `PLACEMENT_KINDS`: a pair, or the role of the worker that does all."""
    match placement:
        case Pair():
            return "pair"
        case Alone(worker):
            return f"{worker.role.value}_alone"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRules:
    """When a decode worker prefills by itself; without prefill workers it always does.

    Attributes:
        local_prefill_tokens: a prompt of which the decode worker lacks at most so many tokens is never handed
            off.
        decode_prefill_tokens: one of which it lacks at most so many and has cached most is handed off only if
            that costs less.
        loaded_prefill_s: so is every prompt while it would wait longer for a prefill worker.
    """

    local_prefill_tokens: int = 0
    decode_prefill_tokens: int = 128
    loaded_prefill_s: float = 2.0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A placement that was weighed.

    Attributes:
        cached_decode: tokens that the worker which decodes has.
    """

    placement: Placement
    cost: Cost
    cached_decode: int


@dataclass(frozen=True, slots=True)
class Decision:
    """`candidates`: the cheapest, the chosen one first."""

    need: Need
    candidates: tuple[Candidate, ...]

    @property
    def chosen(self) -> Candidate:
        return self.candidates[0]


@dataclass(frozen=True, slots=True)
class PlacementInputs:
    """What is known beside the workers.

    Attributes:
        cached_tokens: of the request, by session; none where there is no entry.
        bytes_per_s: of the link between two workers, by their ids.
        chance: draws from large pools.
    """

    cached_tokens: Mapping[str, int]
    bytes_per_s: Callable[[str, str], float]
    chance: Random


def decide(
    need: Need,
    workers: Sequence[WorkerSnapshot],
    inputs: PlacementInputs,
    rules: PlacementRules,
    mover: WorkerSnapshot | None = None,
) -> Decision | None:
    """The cheapest placement on workers that take new requests. None: there is none.

    Where costs are equal to a tenth of a millisecond, the less loaded workers are chosen.
    A single token is decoded where the prompt is prefilled, if a prefill worker is there.

    Args:
        mover: one that leaves, gave the request back, and can hand on what it has of its KV.
    """
    choice = _Choice(need, inputs, rules)
    open_ = [worker for worker in workers if not worker.draining]
    prefill = choice.sample([worker for worker in open_ if worker.role is Role.PREFILL])
    decode = choice.sample(_with_room(need, [worker for worker in open_ if worker.role is Role.DECODE]))
    candidates = choice.candidates(prefill, decode)
    if mover is not None:
        candidates += choice.moves(mover, decode or prefill)
    if len(candidates) > 1:
        candidates.sort(key=_order)
    return Decision(need, tuple(candidates[:SHOWN_CANDIDATES])) if candidates else None


def _with_room(need: Need, workers: list[WorkerSnapshot]) -> list[WorkerSnapshot]:
    """All, if none has: the request waits on one of them."""
    return [worker for worker in workers if has_room(need, worker)] or workers


def _order(candidate: Candidate) -> tuple[object, ...]:
    match candidate.placement:
        case Pair(prefill, decode):
            first, last = prefill, decode
        case Alone(worker):
            first = last = worker
    return (
        round(candidate.cost.total_s, 4),
        first.waiting_prompt_tokens,
        last.num_running + last.num_waiting,
        first.num_running + first.num_waiting,
        -last.free_blocks,
    )


class _Choice:
    """One decision in the making."""

    def __init__(self, need: Need, inputs: PlacementInputs, rules: PlacementRules) -> None:
        self._need = need
        self._inputs = inputs
        self._rules = rules

    def sample(self, workers: list[WorkerSnapshot]) -> list[WorkerSnapshot]:
        """Those of a pool that are compared."""
        if len(workers) <= LARGE_POOL:
            return workers
        longest = max(workers, key=lambda worker: (self._cached(worker), -worker.waiting_prompt_tokens))
        drawn = self._inputs.chance.sample(workers, 2)
        has_prefix = self._cached(longest) > 0
        return [*drawn, longest] if has_prefix and longest not in drawn else drawn

    def candidates(
        self, prefill: Sequence[WorkerSnapshot], decode: Sequence[WorkerSnapshot]
    ) -> list[Candidate]:
        if self._need.max_new_tokens == 1 and prefill:
            return [self._alone(worker) for worker in prefill]
        short = [self._alone(worker) for worker in decode if self._is_short(worker)]
        if short:
            return short
        pairs = [self._pair(p, d) for p in prefill for d in decode if d.can_take(p)]
        if not pairs:
            return [self._alone(worker) for worker in decode or prefill]
        is_loaded = min(pair.cost.wait_s for pair in pairs) > self._rules.loaded_prefill_s
        return pairs + [self._alone(worker) for worker in decode if is_loaded or self._has_most(worker)]

    def moves(self, mover: WorkerSnapshot, receivers: Sequence[WorkerSnapshot]) -> list[Candidate]:
        """Of what the mover has, to the last block: it computes no prompt any more."""
        has_all = uncached(self._need, self._cached(mover)) <= mover.block_size
        if not has_all or self._need.max_new_tokens == 1:
            return []
        return [self._pair(mover, receiver) for receiver in receivers if receiver.can_take(mover)]

    def _is_short(self, worker: WorkerSnapshot) -> bool:
        return uncached(self._need, self._cached(worker)) <= self._rules.local_prefill_tokens

    def _has_most(self, worker: WorkerSnapshot) -> bool:
        cached = self._cached(worker)
        lacks = uncached(self._need, cached)
        return lacks < cached and lacks <= self._rules.decode_prefill_tokens

    def _cached(self, worker: WorkerSnapshot) -> int:
        return self._inputs.cached_tokens.get(worker.session, 0)

    def _pair(self, prefill: WorkerSnapshot, decode: WorkerSnapshot) -> Candidate:
        cached_prefill, cached_decode = self._cached(prefill), self._cached(decode)
        cost = pair_cost(
            self._need,
            prefill,
            decode,
            cached_prefill=cached_prefill,
            cached_decode=cached_decode,
            bytes_per_s=self._inputs.bytes_per_s(prefill.worker_id, decode.worker_id),
        )
        return Candidate(Pair(prefill, decode, cached_prefill), cost, cached_decode)

    def _alone(self, worker: WorkerSnapshot) -> Candidate:
        cached = self._cached(worker)
        return Candidate(Alone(worker, cached), alone_cost(self._need, worker, cached), cached)
