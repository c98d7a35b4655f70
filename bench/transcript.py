"""All that a client is told of a request."""

import asyncio
import time
from dataclasses import dataclass, field

from protos import inference_pb2, inference_pb2_grpc
from protos.inference_pb2 import GenerateRequest, GenerateResponse

# Log probabilities of the same token can differ so much between batch shapes.
_SAME_LOGPROB = 1e-4


@dataclass(slots=True)
class Transcript:
    """
    Attributes:
        tokens, texts, logprobs: by sample.
        arrivals_s: of every message, `time.monotonic` seconds.
    """

    tokens: dict[int, list[int]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    prompt_logprobs: list[float] = field(default_factory=list)
    finish_reasons: dict[int, int] = field(default_factory=dict)
    last: GenerateResponse = field(default_factory=GenerateResponse)
    arrivals_s: list[float] = field(default_factory=list)

    def add(self, response: GenerateResponse) -> None:
        """
        Raises:
            ValueError: a token is lost or doubled.
        """
        sample = response.sample
        tokens = self.tokens.setdefault(sample, [])
        if response.token_ids and response.index != len(tokens):
            raise ValueError(f"sample {sample} has {len(tokens)} tokens, the next begin at {response.index}")
        tokens += response.token_ids
        self.texts[sample] = self.texts.get(sample, "") + response.text
        self.logprobs.setdefault(sample, []).extend(each.logprob for each in response.logprobs)
        self.prompt_logprobs += [each.logprob for each in response.prompt_logprobs]
        if response.HasField("finish_reason"):
            self.finish_reasons[sample] = response.finish_reason
        self.last = response
        self.arrivals_s.append(time.monotonic())

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens.values()))

    def differences(self, other: "Transcript") -> list[str]:
        """What should be the same and is not."""
        pairs = {
            "tokens": (self.tokens, other.tokens),
            "texts": (self.texts, other.texts),
            "finish reasons": (self.finish_reasons, other.finish_reasons),
            "prompt tokens": (self.last.usage.prompt_tokens, other.last.usage.prompt_tokens),
            "completion tokens": (self.last.usage.completion_tokens, other.last.usage.completion_tokens),
            "tokens, as they were counted": (self.last.usage.completion_tokens, self.num_tokens),
        }
        found = [f"{name}: {mine} and {theirs}" for name, (mine, theirs) in pairs.items() if mine != theirs]
        if not _nearly_equal(self._all_logprobs(), other._all_logprobs()):
            found.append("log probabilities")
        return found

    def _all_logprobs(self) -> list[float]:
        of_samples = [each for sample in sorted(self.logprobs) for each in self.logprobs[sample]]
        return self.prompt_logprobs + of_samples


def _nearly_equal(ours: list[float], theirs: list[float]) -> bool:
    return len(ours) == len(theirs) and all(
        abs(a - b) < _SAME_LOGPROB for a, b in zip(ours, theirs, strict=True)
    )


async def transcribe(stub: inference_pb2_grpc.InferenceStub, request: GenerateRequest) -> Transcript:
    """
    Raises:
        grpc.aio.AioRpcError: the request got an error.
        ValueError: a token was lost or doubled.
    """
    transcript = Transcript()
    async for response in stub.Generate(request, timeout=300):
        transcript.add(response)
    return transcript


async def transcribe_all(
    stub: inference_pb2_grpc.InferenceStub, requests: list[GenerateRequest]
) -> list[Transcript]:
    """At once."""
    return list(await asyncio.gather(*(transcribe(stub, request) for request in requests)))


def token_request(
    prompt: list[int], sampling: inference_pb2.SamplingParams, cache_salt: str = ""
) -> GenerateRequest:
    ids = inference_pb2.TokenIds(ids=prompt)
    return GenerateRequest(token_ids=ids, sampling=sampling, cache_salt=cache_salt)
