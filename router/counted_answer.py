"""A streamed answer that counts as it goes."""

from router.completion import Output, Piece
from router.generation_request import RequestDraft, TokenPrompt
from router.openai_answer import AnswerShape, EchoedPrompt
from router.prompt_answer import Body, StreamedAnswer


class CountedAnswer(StreamedAnswer):
    """Every event says how many tokens the prompt and all of its samples have so far, as vLLM's do."""

    def __init__(self, body: Body, echo: EchoedPrompt, shape: AnswerShape, num_prompt_tokens: int) -> None:
        super().__init__(body, echo, shape)
        self._num_prompt_tokens = num_prompt_tokens
        self._num_generated = 0

    def opening(self) -> list[str]:
        return [self._counted(event) for event in super().opening()]

    def events(self, output: Output) -> list[str]:
        if isinstance(output, Piece):
            self._num_generated += len(output.token_ids)
        return [self._counted(event) for event in super().events(output)]

    def _counted(self, event: str) -> str:
        """An event is a JSON object without `usage`."""
        prompt, generated = self._num_prompt_tokens, self._num_generated
        usage = (
            f'"prompt_tokens":{prompt},"completion_tokens":{generated},"total_tokens":{prompt + generated}'
        )
        return f'{event[:-1]},"usage":{{{usage}}}}}'


def streamed_answer(
    body: Body, echo: EchoedPrompt, shape: AnswerShape, draft: RequestDraft
) -> StreamedAnswer:
    """Counted if that is asked for.

    Args:
        draft: whose answer it is; checked, if it is to be counted.
    """
    if body.wants_running_usage:
        assert isinstance(draft.prompt, TokenPrompt)
        return CountedAnswer(body, echo, shape, len(draft.prompt.token_ids))
    return StreamedAnswer(body, echo, shape)
