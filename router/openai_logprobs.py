"""Log probabilities as OpenAI's API and vLLM write them."""

import math
from collections.abc import Sequence

from pydantic import BaseModel

from router.completion import Token, TokenLogprobs
from router.shown_tokens import PlacedToken
from router.tokenizer import Tokenizer

# What OpenAI's API says of tokens that are as good as impossible; JSON has no infinity.
LEAST_LOGPROB = -9999.0


class ChatTop(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class ChatToken(ChatTop):
    top_logprobs: list[ChatTop]


class ChatLogprobs(BaseModel):
    """Of a choice of /v1/chat/completions."""

    content: list[ChatToken]
    refusal: None


class TextLogprobs(BaseModel):
    """Of a choice of /v1/completions: lists as long as its tokens. A prompt's first token has none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(BaseModel):
    """vLLM's, of one token that could stand in a place of the prompt. `rank`: None, it is not known."""

    logprob: float
    rank: int | None
    decoded_token: str


# Of every place of the prompt, by token id; None for the first.
PromptLogprobs = list[dict[str, PromptLogprob] | None]


class LogprobsWriter:
    """Writes tokens with `num_top` of the likeliest in their place."""

    def __init__(self, tokenizer: Tokenizer, num_top: int) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top

    def chat(self, tokens: Sequence[PlacedToken]) -> ChatLogprobs:
        content = [self._chat_token(placed.token) for placed in tokens]
        return ChatLogprobs(content=content, refusal=None)

    def _chat_token(self, token: Token) -> ChatToken:
        assert token.logprobs is not None
        own = self._chat_top(token.id, token.logprobs.logprob)
        top = [self._chat_top(id_, logprob) for id_, logprob in token.logprobs.top[: self._num_top]]
        return ChatToken(token=own.token, logprob=own.logprob, bytes=own.bytes, top_logprobs=top)

    def _chat_top(self, token_id: int, logprob: float) -> ChatTop:
        text, bytes_ = self._tokenizer.token_text(token_id), self._tokenizer.token_bytes(token_id)
        return ChatTop(token=text, logprob=_finite(logprob), bytes=list(bytes_))

    def text(self, tokens: Sequence[PlacedToken]) -> TextLogprobs:
        scores = [placed.token.logprobs for placed in tokens]
        return TextLogprobs(
            tokens=[self._tokenizer.token_text(placed.token.id) for placed in tokens],
            token_logprobs=[None if each is None else _finite(each.logprob) for each in scores],
            top_logprobs=[self._text_top(placed.token) for placed in tokens],
            text_offset=[placed.start for placed in tokens],
        )

    def _text_top(self, token: Token) -> dict[str, float] | None:
        """The likeliest and the token itself. Of tokens with the same text the likeliest counts."""
        if token.logprobs is None:
            return None
        told: dict[str, float] = {}
        for id_, logprob in _top_and_own(token.id, token.logprobs, self._num_top):
            told.setdefault(self._tokenizer.token_text(id_), _finite(logprob))
        return told

    def prompt(self, tokens: Sequence[Token]) -> PromptLogprobs:
        return [self._prompt_token(token) for token in tokens]

    def _prompt_token(self, token: Token) -> dict[str, PromptLogprob] | None:
        if token.logprobs is None:
            return None
        ranks = {id_: rank for rank, (id_, _) in enumerate(token.logprobs.top, start=1)}
        return {
            str(id_): PromptLogprob(
                logprob=_finite(logprob),
                rank=ranks.get(id_),
                decoded_token=self._tokenizer.token_text(id_),
            )
            for id_, logprob in _top_and_own(token.id, token.logprobs, self._num_top)
        }


def _top_and_own(token_id: int, scores: TokenLogprobs, num_top: int) -> list[tuple[int, float]]:
    top = list(scores.top[:num_top])
    return top if any(id_ == token_id for id_, _ in top) else [*top, (token_id, scores.logprob)]


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB) if math.isfinite(logprob) else LEAST_LOGPROB
