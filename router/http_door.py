"""The OpenAI-compatible HTTP door, with what operators ask over HTTP."""

import dataclasses
import json
import re
import time
import uuid
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from router.completion import End, Piece
from router.errors import ErrorCode, RequestError, openai_body
from router.generation_request import ChatPrompt, RequestDraft
from router.generation_service import GenerationService
from router.hang_up import until_hang_up
from router.openai_answer import AnswerShape, ChatShape, TextShape
from router.openai_schema import ChatRequest, CompletionRequest, read_chat, read_completion
from router.tool_style import CallPlan, ToolStyle, plan_calls

MAX_BODY_BYTES = 16 << 20
_REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)


def make_http_door(service: GenerationService, tool_style: ToolStyle | None) -> FastAPI:
    """The ASGI application.

    Args:
        tool_style: how the model writes calls. None: not known.
    """
    door = FastAPI(title="Baton", openapi_url=None)

    @door.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        asked = _Asked.now(request)
        body = read_chat(await _read_body(request))
        plan = plan_calls(body.tool_use(), tool_style)
        shape = ChatShape(asked.request_id, service.card.name, asked.created, plan.new_parser)
        return _Completion(service, body, asked.chat(body, plan), shape)

    @door.post("/v1/completions")
    async def complete(request: Request) -> Response:
        asked = _Asked.now(request)
        body = read_completion(await _read_body(request))
        shape = TextShape(asked.request_id, service.card.name, asked.created)
        return _Completion(service, body, asked.completion(body), shape)

    @door.get("/v1/models")
    async def models() -> Response:
        model = {
            "id": service.card.name,
            "object": "model",
            "created": 0,
            "owned_by": "baton",
            "max_model_len": service.limits.max_model_len,
        }
        return JSONResponse({"object": "list", "data": [model]})

    @door.get("/health")
    async def health() -> Response:
        return Response(status_code=200 if service.is_ready else 503)

    @door.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics_text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @door.get("/workers")
    async def workers() -> Response:
        return JSONResponse([dataclasses.asdict(status) for status in service.worker_statuses()])

    @door.exception_handler(RequestError)
    async def on_request_error(_: Request, error: RequestError) -> Response:
        return _error_response(error)

    @door.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        code = ErrorCode.NOT_FOUND if error.status_code == 404 else ErrorCode.INVALID_ARGUMENT
        refused = RequestError(code, f"{request.method} {request.url.path}: {error.detail}")
        return JSONResponse(openai_body(refused), status_code=error.status_code)

    @door.exception_handler(Exception)
    async def on_defect(request: Request, _: Exception) -> Response:
        # Starlette raises it again after this answer, so that the log has its trace.
        return _error_response(RequestError(ErrorCode.INTERNAL, "the router failed; its log says why"))

    return door


@dataclass(frozen=True, slots=True)
class _Asked:
    """Who asked, and when: on both clocks."""

    request_id: str
    arrival_s: float
    arrival_unix_s: float

    @classmethod
    def now(cls, request: Request) -> "_Asked":
        """The client's X-Request-Id where it sends a sound one."""
        given = request.headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        return cls(request_id, time.monotonic(), time.time())

    @property
    def created(self) -> int:
        return int(self.arrival_unix_s)

    def completion(self, body: CompletionRequest) -> RequestDraft:
        return RequestDraft(
            request_id=self.request_id,
            model=body.model,
            prompt=body.prompt(),
            sampling=body.sampling(),
            stop=body.stops(),
            arrival_s=self.arrival_s,
            arrival_unix_s=self.arrival_unix_s,
        )

    def chat(self, body: ChatRequest, plan: CallPlan) -> RequestDraft:
        return RequestDraft(
            request_id=self.request_id,
            model=body.model,
            prompt=ChatPrompt(body.chat_messages(), plan.tools, plan.answer_start),
            sampling=plan.sampling(body.sampling()),
            stop=body.stops(),
            markup=plan.markup,
            arrival_s=self.arrival_s,
            arrival_unix_s=self.arrival_unix_s,
        )


async def _read_body(request: Request) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise RequestError(ErrorCode.INVALID_ARGUMENT, f"the body is over {MAX_BODY_BYTES} bytes")
    return bytes(body)


class _Completion(Response):
    """Runs a request while its client is there, and answers whole or as server-sent events."""

    def __init__(
        self,
        service: GenerationService,
        body: ChatRequest | CompletionRequest,
        draft: RequestDraft,
        shape: AnswerShape,
    ) -> None:
        self._service = service
        self._body = body
        self._draft = draft
        self._shape = shape
        self._headers = {"x-request-id": draft.request_id}
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._stream if self._body.stream else self._whole
        await until_hang_up(receive, answer(scope, receive, send))

    def _outputs(self) -> AsyncGenerator[Piece | End, None]:
        return self._service.generate(self._draft)

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        texts: list[str] = []
        response: Response | None = None
        try:
            async with aclosing(self._outputs()) as outputs:
                async for output in outputs:
                    texts.append(output.text)
                    if isinstance(output, End):
                        body = self._shape.whole("".join(texts), output)
                        response = Response(body, media_type="application/json", headers=self._headers)
        except RequestError as error:
            response = _error_response(error, self._headers)
        assert response is not None
        await response(scope, receive, send)

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An error before the first output still is an HTTP status; a later one is the last event."""
        try:
            async with aclosing(self._outputs()) as outputs:
                first = await anext(outputs)
                await send(_stream_start(self._headers))
                await _send_events(send, [*self._shape.opening(), *self._events(first)])
                try:
                    async for output in outputs:
                        await _send_events(send, self._events(output))
                except RequestError as error:
                    await _send_events(send, [json.dumps(openai_body(error))])
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except RequestError as error:
            await _error_response(error, self._headers)(scope, receive, send)

    def _events(self, output: Piece | End) -> list[str]:
        events = self._shape.text_chunks(output.text) if output.text else []
        if isinstance(output, End):
            events += self._shape.last_chunks(output.finish_reason)
            if self._body.wants_usage_chunk:
                events.append(self._shape.usage_chunk(output.usage))
            events.append("[DONE]")
        return events


def _stream_start(headers: Mapping[str, str]) -> dict[str, object]:
    all_headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", **headers}
    return {
        "type": "http.response.start",
        "status": 200,
        "headers": [(name.encode(), value.encode()) for name, value in all_headers.items()],
    }


async def _send_events(send: Send, events: list[str]) -> None:
    if events:
        body = "".join(f"data: {event}\n\n" for event in events).encode()
        await send({"type": "http.response.body", "body": body, "more_body": True})


def _error_response(error: RequestError, headers: Mapping[str, str] | None = None) -> Response:
    all_headers = dict(headers or {})
    if error.retry_after_s is not None:
        all_headers["retry-after"] = str(max(1, round(error.retry_after_s)))
    return JSONResponse(openai_body(error), status_code=error.code.http_status, headers=all_headers)
