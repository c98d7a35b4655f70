"""What `baton explain` shows: where a request would go, or went, and what else was weighed."""

from dataclasses import dataclass

from router.decision_log import RecordedDecision
from router.placement import Candidate, Decision, Pair, kind_of


@dataclass(frozen=True, slots=True, kw_only=True)
class WeighedPlacement:
    """
    Attributes:
        kind: "pair", "prefill_alone" or "decode_alone".
        prefill_worker, decode_worker: ids; the same where one does all.
        cached_prefill_tokens, cached_decode_tokens: of the request, that these workers have.
        cost_s: what the terms add up to: the least is chosen. The terms are router/placement_cost.py's.
    """

    kind: str
    prefill_worker: str
    decode_worker: str
    cached_prefill_tokens: int
    cached_decode_tokens: int
    cost_s: float
    wait_s: float
    prefill_s: float
    transfer_s: float
    decode_s: float
    disturbance_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """One decision.

    Attributes:
        decided_unix_s: when. None: it is what would be decided now.
        num_tokens: of the prompt, with what was generated before.
        candidates: the cheapest that were weighed, the chosen one first. Empty: there is no worker.
        expected_ttft_s: with the wait in the router; None of a past decision.
    """

    request_id: str
    decided_unix_s: float | None
    num_tokens: int
    candidates: tuple[WeighedPlacement, ...]
    expected_ttft_s: float | None = None


def explain_recorded(recorded: RecordedDecision) -> Explanation:
    return Explanation(
        request_id=recorded.request_id,
        decided_unix_s=recorded.decided_unix_s,
        num_tokens=recorded.decision.need.num_tokens,
        candidates=_weighed(recorded.decision),
    )


def explain_now(
    request_id: str, num_tokens: int, decision: Decision | None, expected_ttft_s: float | None
) -> Explanation:
    return Explanation(
        request_id=request_id,
        decided_unix_s=None,
        num_tokens=num_tokens,
        candidates=() if decision is None else _weighed(decision),
        expected_ttft_s=expected_ttft_s,
    )


def _weighed(decision: Decision) -> tuple[WeighedPlacement, ...]:
    return tuple(_weighed_placement(candidate) for candidate in decision.candidates)


def _weighed_placement(candidate: Candidate) -> WeighedPlacement:
    placement, cost = candidate.placement, candidate.cost
    is_pair = isinstance(placement, Pair)
    return WeighedPlacement(
        kind=kind_of(placement),
        prefill_worker=placement.prefill.worker_id if is_pair else placement.worker.worker_id,
        decode_worker=placement.decode.worker_id if is_pair else placement.worker.worker_id,
        cached_prefill_tokens=placement.cached_tokens,
        cached_decode_tokens=candidate.cached_decode,
        cost_s=cost.total_s,
        wait_s=cost.wait_s,
        prefill_s=cost.prefill_s,
        transfer_s=cost.transfer_s,
        decode_s=cost.decode_s,
        disturbance_s=cost.disturbance_s,
    )
