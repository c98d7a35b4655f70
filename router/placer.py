"""Places attempts: the decision, what it takes of the workers, and the record of it."""

import time
from collections.abc import Sequence
from random import Random

from router.block_names import block_names
from router.cluster_view import WorkerSnapshot
from router.decision_log import DecisionLog, RecordedDecision
from router.fleet import Fleet
from router.generation_request import GenerationRequest
from router.metrics import RouterMetrics
from router.placement import (
    Alone,
    Decision,
    Pair,
    PlacementInputs,
    PlacementRules,
    decide,
    kind_of,
)
from router.placement_cost import Need, blocks_needed, uncached


class Placer:
    """Knows what the fleet has observed, and keeps to the rules.

    Attributes:
        log: of the decisions that were made.
    """

    def __init__(self, fleet: Fleet, rules: PlacementRules, metrics: RouterMetrics, chance: Random) -> None:
        """`chance`: draws from large pools."""
        self.log = DecisionLog()
        self._fleet = fleet
        self._rules = rules
        self._metrics = metrics
        self._chance = chance

    def record(self, request_id: str, decision: Decision) -> None:
        """An attempt was submitted as it was decided."""
        self.log.record(RecordedDecision(request_id, time.time(), decision))
        self._metrics.placed(kind_of(decision.chosen.placement))

    def decide(
        self,
        workers: Sequence[WorkerSnapshot],
        request: GenerationRequest,
        generated: Sequence[int] = (),
        mover: WorkerSnapshot | None = None,
    ) -> Decision | None:
        """Where an attempt would go. None: nobody takes it.

        Args:
            workers: to choose among, with live sessions.
            generated: tokens that are there already.
            mover: see `router.placement.decide`.
        """
        tokens = (*request.prompt, *generated) if generated else request.prompt
        need = Need(len(tokens), request.sampling.max_tokens - len(generated))
        inputs = PlacementInputs(
            self._cached_tokens([*workers, mover] if mover else workers, tokens, request.cache_salt),
            self._fleet.observations.links.bytes_per_s,
            self._chance,
        )
        return decide(need, workers, inputs, self._rules, mover)

    def uncached_tokens(self, request: GenerationRequest) -> int:
        """Prompt tokens to compute where the longest prefix is; at least 1."""
        cached = self._cached_tokens(self._fleet.snapshot(), request.prompt, request.cache_salt)
        return max(1, len(request.prompt) - max(cached.values(), default=0))

    def _cached_tokens(
        self, workers: Sequence[WorkerSnapshot], tokens: Sequence[int], salt: str
    ) -> dict[str, int]:
        """By session. What a worker cannot use of its last block is not taken off."""
        prefixes = self._fleet.observations.prefixes
        cached: dict[str, int] = {}
        for block_size in {worker.block_size for worker in workers}:
            found = prefixes.longest(block_names(tokens, block_size, salt))
            cached |= {session: count * block_size for session, count in found.items()}
        return cached

    def book(self, decision: Decision) -> None:
        """What the submission that follows at once will take of the workers."""
        placement, need = decision.chosen.placement, decision.need
        computed = uncached(need, placement.cached_tokens)
        match placement:
            case Pair(prefill, decode):
                self._fleet.session(prefill).expect(prompt_tokens=computed, blocks=0)
                self._fleet.session(decode).expect(prompt_tokens=0, blocks=blocks_needed(need, decode))
            case Alone(worker):
                session = self._fleet.session(worker)
                session.expect(prompt_tokens=computed, blocks=blocks_needed(need, worker))
