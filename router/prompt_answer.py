"""The answer to one prompt, from its outputs: as events, or as it grows to a whole."""

import asyncio
from collections.abc import Sequence

from router.completion import End, Output, Piece, SampleEnd, ScoredPrompt
from router.generation_request import Prompt, TextPrompt, TokenPrompt
from router.openai_answer import AnswerShape, EchoedPrompt, WholeSample
from router.openai_schema import ChatRequest, CompletionRequest
from router.shown_tokens import PlacedToken, ShownTokens, placed_prompt
from router.tokenizer import Tokenizer

Body = ChatRequest | CompletionRequest


async def echo_of(tokenizer: Tokenizer, body: Body, prompt: Prompt, first: Output) -> EchoedPrompt:
    """What the client wants back of its prompt, once the first output says that it was sound."""
    if not body.echo:
        return EchoedPrompt()
    text = _prompt_text(tokenizer, prompt)
    if not isinstance(first, ScoredPrompt) or body.num_logprobs is None:
        return EchoedPrompt(text)
    # Decodes the prompt token by token: a long one would hold up every stream.
    placed = await asyncio.to_thread(placed_prompt, tokenizer, first.tokens, text)
    return EchoedPrompt(text, placed)


def _prompt_text(tokenizer: Tokenizer, prompt: Prompt) -> str:
    match prompt:
        case TextPrompt(text):
            return text
        case TokenPrompt(token_ids):
            return tokenizer.prompt_text(token_ids)
        case _:
            return ""


class StreamedAnswer:
    """Outputs as events."""

    __slots__ = ("_echo", "_shape", "_shown", "_tells_tokens")

    def __init__(self, body: Body, echo: EchoedPrompt, shape: AnswerShape) -> None:
        self._echo = echo
        self._shape = shape
        # With their log probabilities; without, a chunk has nothing of its tokens but their text.
        self._tells_tokens = body.num_logprobs is not None
        self._shown = [ShownTokens(len(echo.text)) for _ in range(body.num_samples)]

    def opening(self) -> list[str]:
        """Before the events of the first output."""
        return self._shape.opening(len(self._shown), self._echo)

    def events(self, output: Output) -> list[str]:
        match output:
            case Piece():
                sample = output.sample
                if self._tells_tokens:
                    return self._chunks(sample, output.text, self._shown[sample].push(output))
                return self._shape.chunks(sample, output.text, ()) if output.text else []
            case ScoredPrompt():
                return []
            case SampleEnd():
                return self._sample_end(output)
            case End(last=last):
                return self._sample_end(last)

    def _sample_end(self, end: SampleEnd) -> list[str]:
        tokens = self._shown[end.sample].finish(end) if self._tells_tokens else []
        rest = self._chunks(end.sample, end.text, tokens)
        return [*rest, *self._shape.last_chunks(end.sample, end.finish_reason)]

    def _chunks(self, sample: int, text: str, tokens: Sequence[PlacedToken]) -> list[str]:
        if text or tokens:
            return self._shape.chunks(sample, text, tokens)
        return []


class WholeAnswer:
    """Outputs as they grow to an answer."""

    def __init__(self, body: Body, echo: EchoedPrompt) -> None:
        self.echo = echo
        self.samples = [WholeSample() for _ in range(body.num_samples)]
        self.scored: ScoredPrompt | None = None
        self._shown = [ShownTokens(len(echo.text)) for _ in self.samples]

    def add(self, output: Output) -> None:
        match output:
            case ScoredPrompt():
                self.scored = output
            case Piece():
                self._grow(output.sample, output.text, self._shown[output.sample].push(output))
            case SampleEnd():
                self._finish(output)
            case End(last=last):
                self._finish(last)

    def _finish(self, end: SampleEnd) -> None:
        self._grow(end.sample, end.text, self._shown[end.sample].finish(end))
        self.samples[end.sample].reason = end.finish_reason

    def _grow(self, sample: int, text: str, tokens: list[PlacedToken]) -> None:
        self.samples[sample].texts.append(text)
        self.samples[sample].tokens += tokens
