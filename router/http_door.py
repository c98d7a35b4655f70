"""The OpenAI-compatible HTTP door, with what operators ask over HTTP."""

import dataclasses
import logging
import time
from dataclasses import dataclass

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from router.api_keys import ApiKey
from router.batch_response import BatchResponse
from router.body_budget import HttpBodies
from router.doorkeeper import Doorkeeper
from router.errors import ErrorCode, RequestError, invalid, openai_body
from router.generation_request import ChatPrompt, Prompt, RequestDraft
from router.generation_service import GenerationService
from router.hot_routes import HotRoutes
from router.http_keys import HttpKeys, api_key_of
from router.openai_answer import ChatShape, TextShape
from router.openai_response import OpenAIResponse, answer_head, error_response
from router.openai_schema import ChatRequest, CompletionRequest, read_chat, read_completion
from router.request_id import HttpRequestIds, request_id_of
from router.strict_body import StrictBody, parse
from router.token_schema import DetokenizeAnswer, TokenizeAnswer, read_detokenize, read_tokenize
from router.tokenization import detokenize, tokenize
from router.tool_style import CallPlan, ToolStyle, plan_calls

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 16 << 20


def make_http_door(
    service: GenerationService, tool_style: ToolStyle | None, doorkeeper: Doorkeeper
) -> ASGIApp:
    """The ASGI application.

    Args:
        tool_style: how the model writes calls. None: not known.
    """
    answers = _Answers(service, tool_style)
    hot = {"/v1/chat/completions": answers.chat, "/v1/completions": answers.complete}
    routes = HotRoutes(_make_application(service, tool_style, answers), hot, _answer_error)
    return HttpRequestIds(HttpKeys(HttpBodies(routes, service.bodies), doorkeeper))


def _make_application(
    service: GenerationService, tool_style: ToolStyle | None, answers: "_Answers"
) -> FastAPI:
    """All endpoints, the hot ones too: it knows what to say of a GET of theirs."""
    door = FastAPI(title="Baton", openapi_url=None)
    door.post("/v1/chat/completions")(answers.chat)
    door.post("/v1/completions")(answers.complete)
    _serve_tokens(door, service, tool_style)
    _serve_models(door, service)
    _serve_operators(door, service, tool_style)
    _explain_errors(door)
    return door


class _Answers:
    """What the model says."""

    def __init__(self, service: GenerationService, tool_style: ToolStyle | None) -> None:
        self._service = service
        self._tool_style = tool_style

    async def chat(self, request: Request) -> Response:
        asked = _Asked.now(request)
        body = read_chat(await _read_body(request))
        plan = plan_calls(body.tool_use(), self._tool_style)
        draft = asked.chat(body, plan)
        shape = ChatShape(answer_head(self._service, body, draft), plan.new_parser)
        return OpenAIResponse(self._service, body, draft, shape)

    async def complete(self, request: Request) -> Response:
        asked = _Asked.now(request)
        body = read_completion(await _read_body(request))
        drafts = asked.completions(body)
        head = answer_head(self._service, body, drafts[0])
        if len(drafts) > 1:
            return BatchResponse(self._service, body, drafts, head)
        return OpenAIResponse(self._service, body, drafts[0], TextShape(head))


def _serve_tokens(door: FastAPI, service: GenerationService, tool_style: ToolStyle | None) -> None:
    @door.post("/tokenize")
    async def tokens_of(request: Request) -> Response:
        body = read_tokenize(await _read_body(request))
        tokens = await tokenize(service, body.draft(tool_style))
        names = await service.tokenizer.names(tokens) if body.return_token_strs else None
        longest = service.limits.max_model_len
        return _json(
            TokenizeAnswer(count=len(tokens), max_model_len=longest, tokens=tokens, token_strs=names)
        )

    @door.post("/detokenize")
    async def text_of(request: Request) -> Response:
        body = read_detokenize(await _read_body(request))
        text = await detokenize(service, "tokens", body.model, body.tokens)
        return _json(DetokenizeAnswer(prompt=text))


def _serve_models(door: FastAPI, service: GenerationService) -> None:
    @door.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [_model(service)]})

    @door.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        service.check_model(name)
        return JSONResponse(_model(service))


def _serve_operators(door: FastAPI, service: GenerationService, tool_style: ToolStyle | None) -> None:
    @door.get("/health")
    async def health() -> Response:
        return Response(status_code=200 if service.is_ready else 503)

    @door.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics_text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @door.get("/workers")
    async def workers() -> Response:
        return JSONResponse([dataclasses.asdict(status) for status in service.worker_statuses()])

    @door.post("/explain")
    async def explain(request: Request) -> Response:
        asked = _Asked.now(request)
        explanation = await service.explain(asked.either(await _read_body(request), tool_style))
        return JSONResponse(dataclasses.asdict(explanation))

    @door.get("/explain/{request_id}")
    async def explain_past(request_id: str) -> Response:
        return JSONResponse([dataclasses.asdict(each) for each in service.explain_past(request_id)])


def _explain_errors(door: FastAPI) -> None:
    @door.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        code = ErrorCode.NOT_FOUND if error.status_code == 404 else ErrorCode.INVALID_ARGUMENT
        refused = RequestError(code, f"{request.method} {request.url.path}: {error.detail}")
        body = openai_body(refused, request_id_of(request))
        return JSONResponse(body, status_code=error.status_code)

    @door.exception_handler(RequestError)
    @door.exception_handler(Exception)
    async def on_error(request: Request, error: Exception) -> Response:
        return _answer_error(request, error)


def _answer_error(request: Request, error: Exception) -> Response:
    request_id = request_id_of(request)
    if isinstance(error, RequestError):
        logger.info("%s: %s: %s", request_id, error.code.name, error.message)
        return error_response(error, request_id)
    logger.error("%s: failed", request_id, exc_info=error)
    return error_response(RequestError(ErrorCode.INTERNAL, "the router failed; its log says why"), request_id)


@dataclass(frozen=True, slots=True)
class _Asked:
    """Who asked, and when: on both clocks."""

    request_id: str
    api_key: ApiKey
    arrival_s: float
    arrival_unix_s: float

    @classmethod
    def now(cls, request: Request) -> "_Asked":
        return cls(request_id_of(request), api_key_of(request), time.monotonic(), time.time())

    def either(self, text: bytes, tool_style: ToolStyle | None) -> RequestDraft:
        """Of the body of a chat or of a completion."""
        if parse(_Kind, text).messages is None:
            drafts = self.completions(read_completion(text))
            if len(drafts) > 1:
                raise invalid("prompt", "must be one here")
            return drafts[0]
        body = read_chat(text)
        return self.chat(body, plan_calls(body.tool_use(), tool_style))

    def completions(self, body: CompletionRequest) -> list[RequestDraft]:
        """Of each prompt."""
        return [self._completion(body, prompt) for prompt in body.prompts()]

    def _completion(self, body: CompletionRequest, prompt: Prompt) -> RequestDraft:
        return RequestDraft(
            request_id=self.request_id,
            model=body.model,
            prompt=prompt,
            sampling=body.sampling(),
            stop=body.stops(),
            cache_salt=body.cache_salt or "",
            api_key=self.api_key,
            priority=body.priority or 0,
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
            cache_salt=body.cache_salt or "",
            api_key=self.api_key,
            priority=body.priority or 0,
            arrival_s=self.arrival_s,
            arrival_unix_s=self.arrival_unix_s,
        )


class _Kind(StrictBody):
    """Tells a chat from a completion."""

    messages: object = None


def _model(service: GenerationService) -> dict[str, str | int | None]:
    return {
        "id": service.card.name,
        "object": "model",
        "created": 0,
        "owned_by": "baton",
        "max_model_len": service.limits.max_model_len,
    }


def _json(answer: BaseModel) -> Response:
    return Response(answer.model_dump_json(), media_type="application/json")


async def _read_body(request: Request) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise RequestError(ErrorCode.INVALID_ARGUMENT, f"the body is over {MAX_BODY_BYTES} bytes")
    return bytes(body)
