"""What the next token of a sequence depends on beside its logits and parameters: all of it follows from
its tokens, and is kept up to date as they come.
"""

from collections.abc import Sequence

from engine.grammar import GrammarMatcher
from engine.logit_adjustments import LogitAdjustments, adjusts_logits
from engine.request import EngineRequest


class SamplingState:
    """Penalties and grammar of one sequence after its first `num_seen` tokens.

    It is never moved and never saved: whoever has the tokens builds it again.
    """

    def __init__(self, request: EngineRequest) -> None:
        self.adjustments = (
            LogitAdjustments(request.sampling, request.prompt) if adjusts_logits(request.sampling) else None
        )
        self.matcher = GrammarMatcher(request.grammar) if request.grammar is not None else None
        self._num_seen = len(request.prompt)

    @staticmethod
    def is_needed(request: EngineRequest) -> bool:
        return request.grammar is not None or adjusts_logits(request.sampling)

    def catch_up(self, tokens: Sequence[int]) -> None:
        """`tokens`: the sequence's, prompt and generated; those seen before are the same as then."""
        new = tokens[self._num_seen :]
        self._num_seen = len(tokens)
        if self.adjustments is not None:
            self.adjustments.generated(new)
        if self.matcher is not None:
            for token in new:
                self.matcher.advance(token)
