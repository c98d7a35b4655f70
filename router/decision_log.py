"""Where the last requests went, and why."""

from collections import deque
from dataclasses import dataclass

from router.placement import Decision

MAX_DECISIONS = 1000


@dataclass(frozen=True, slots=True)
class RecordedDecision:
    """One attempt at a request. `decided_unix_s`: when it was placed."""

    request_id: str
    decided_unix_s: float
    decision: Decision


class DecisionLog:
    """The last decisions, oldest first out."""

    def __init__(self) -> None:
        self._recorded: deque[RecordedDecision] = deque(maxlen=MAX_DECISIONS)

    def record(self, decision: RecordedDecision) -> None:
        self._recorded.append(decision)

    def of(self, request_id: str) -> list[RecordedDecision]:
        """Of every attempt at the request that is remembered, the first one first."""
        return [recorded for recorded in self._recorded if recorded.request_id == request_id]
