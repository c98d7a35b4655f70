"""A sample whose tokens hold its end already: an earlier worker died before it could say so."""

from engine.request import FinishReason
from engine.step_result import EndedSequence
from protos import worker_pb2
from worker.leg import FINISH_REASONS, Assignment, Leg


class EndedLeg(Leg):
    """Says the end, and nothing else. Holds nothing."""

    def __init__(self, assignment: Assignment, reason: FinishReason) -> None:
        super().__init__(assignment)
        self._reason = reason

    async def run(self) -> None:
        submit = self.assignment.submit
        self.assignment.session.event().finished.append(
            worker_pb2.Finished(
                attempt=submit.attempt, sample=submit.sample, finish_reason=FINISH_REASONS[self._reason]
            )
        )

    def close(self) -> None:
        """Nothing is held."""

    def on_ended(self, ended: EndedSequence) -> None:
        raise AssertionError("no engine has this leg's sequence")
