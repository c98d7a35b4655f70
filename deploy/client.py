"""A client of the gRPC door."""

import time
from collections.abc import Iterator
from statistics import median

from deploy.client_access import ClientAccess
from protos import inference_pb2, inference_pb2_grpc


class InferenceClient:
    """Sends prompts to a router and yields what it answers, as it comes."""

    def __init__(self, address: str, access: ClientAccess = ClientAccess()) -> None:
        """address: host:port of the gRPC door.

        Raises:
            AccessError: a file of `access` cannot be used.
        """
        self._channel = access.channel(address)
        self._metadata = tuple(access.authorization.items())
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)

    def __enter__(self) -> "InferenceClient":
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def generate(self, request: inference_pb2.GenerateRequest) -> Iterator[inference_pb2.GenerateResponse]:
        """Ending the iteration early cancels the request.

        Raises:
            grpc.RpcError: with one of the codes named in protos/inference.proto.
        """
        call = self._stub.Generate(request, metadata=self._metadata)
        try:
            yield from call
        finally:
            call.cancel()


def chat_request(
    messages: list[inference_pb2.ChatMessage], sampling: inference_pb2.SamplingParams
) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(chat=inference_pb2.Chat(messages=messages), sampling=sampling)


class ArrivalTimes:
    """When tokens came to the client: its time to first token and between tokens."""

    def __init__(self) -> None:
        self._start_s = time.perf_counter()
        self._first_s: float | None = None
        self._last_s = self._start_s
        self._gaps_s: list[float] = []

    def add(self, response: inference_pb2.GenerateResponse) -> None:
        """A group of n tokens counts as one gap and n - 1 gaps of zero."""
        if not response.token_ids:
            return
        now_s = time.perf_counter()
        if self._first_s is None:
            self._first_s = now_s
        else:
            self._gaps_s.append(now_s - self._last_s)
        self._gaps_s += [0.0] * (len(response.token_ids) - 1)
        self._last_s = now_s

    @property
    def ttft_s(self) -> float | None:
        """None: no token came."""
        return None if self._first_s is None else self._first_s - self._start_s

    @property
    def itl_s(self) -> float | None:
        """Median time between tokens. None: fewer than two came."""
        return median(self._gaps_s) if self._gaps_s else None
