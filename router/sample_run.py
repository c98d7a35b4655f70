"""One sample of a request, from its first token to its end."""

from collections.abc import Sequence

from router.completion import FinishReason, Piece, SampleEnd, TokenLogprobs
from router.text_stream import TextStream


class SampleRun:
    """A sample's tokens so far are its whole state: an attempt starts from them.

    Attributes:
        number: its place among the request's samples.
        generated: the token ids that count.
        end: once it has ended.
        last_arrival_s: of its last token, on `time.monotonic`'s clock.
    """

    __slots__ = ("_text", "end", "generated", "last_arrival_s", "number")

    def __init__(self, number: int, text: TextStream) -> None:
        self.number = number
        self.generated: list[int] = []
        self.end: SampleEnd | None = None
        self.last_arrival_s: float | None = None
        self._text = text

    def push(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] | None = None) -> Piece:
        """The next tokens. They may bring a stop string, and with it the end."""
        index = len(self.generated)
        text, starts, stopped = self._text.push(token_ids)
        if stopped:
            token_ids = token_ids[: len(starts)]
            logprobs = None if logprobs is None else logprobs[: len(starts)]
            self.end = SampleEnd(self.number, index + len(starts), "", FinishReason.STOP, True)
        self.generated += token_ids
        return Piece(self.number, index, token_ids, starts, text, logprobs)

    def finish(self, reason: FinishReason) -> SampleEnd:
        """No token follows."""
        rest = self._text.finish()
        reason = FinishReason.STOP if rest.stopped else reason
        self.end = SampleEnd(self.number, len(self.generated), rest.text, reason, rest.stopped)
        return self.end
