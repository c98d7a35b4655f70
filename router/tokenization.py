"""Tokens of a prompt without an answer, and back, for both doors."""

from collections.abc import Sequence
from dataclasses import dataclass

from router.generation_request import ChatPrompt, TextPrompt
from router.generation_service import GenerationService
from router.sampling_options import check_token_ids


@dataclass(frozen=True, slots=True)
class TokenizeDraft:
    """What a client asked, unchecked.

    Attributes:
        model: empty: the one that is served.
        add_generation_prompt: a chat ends with the opening of the assistant's turn.
    """

    model: str
    prompt: TextPrompt | ChatPrompt
    add_generation_prompt: bool = True


async def tokenize(service: GenerationService, draft: TokenizeDraft) -> tuple[int, ...]:
    """However many tokens they are: whether they fit is the client's question.

    Raises:
        RequestError: NOT_FOUND, or INVALID_ARGUMENT, as a request to generate would.
    """
    service.check_model(draft.model)
    match draft.prompt:
        case TextPrompt(text, add_special_tokens):
            return await service.tokenizer.encode_text(text, add_special_tokens=add_special_tokens)
        case ChatPrompt(messages, tools, answer_start):
            return await service.tokenizer.encode_chat(
                messages, tools, answer_start, add_generation_prompt=draft.add_generation_prompt
            )


async def detokenize(service: GenerationService, field: str, model: str, token_ids: Sequence[int]) -> str:
    """The text, special tokens included.

    Args:
        field: what the client calls the tokens.

    Raises:
        RequestError: NOT_FOUND, or INVALID_ARGUMENT, a token is not in the vocabulary.
    """
    service.check_model(model)
    check_token_ids(field, token_ids, service.limits)
    return await service.tokenizer.decode_prompt(token_ids)
