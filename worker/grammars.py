"""The grammars of a worker's requests."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from engine.grammar import GrammarCompiler, GrammarForm, GrammarText
from engine.request import EngineRequest, InvalidRequest
from protos import inference_pb2, worker_pb2
from worker.leg import LegDropped

# One that takes long does not hold up every other.
_NUM_THREADS = 2


class RequestGrammars:
    """Compiles grammars beside the loop and the engine's thread."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="grammar")

    async def complete(self, request: EngineRequest, submit: worker_pb2.Submit) -> EngineRequest:
        """The request with the grammar that its Submit names, if it names one.

        Raises:
            LegDropped: it is none, or one that is not supported.
        """
        if not submit.sampling.HasField("grammar"):
            return request
        loop = asyncio.get_running_loop()
        try:
            text = _grammar_text(submit.sampling.grammar)
            grammar = await loop.run_in_executor(self._threads, self._compiler.compile, text)
        except InvalidRequest as error:
            raise LegDropped(worker_pb2.DROP_CAUSE_INVALID, str(error)) from error
        return replace(request, grammar=grammar)

    def close(self) -> None:
        """What compiles goes on to its end; nothing begins any more."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _grammar_text(grammar: inference_pb2.Grammar) -> GrammarText:
    match grammar.WhichOneof("form"):
        case "json_object":
            return GrammarText(GrammarForm.JSON_OBJECT)
        case "json_schema":
            return GrammarText(GrammarForm.JSON_SCHEMA, grammar.json_schema)
        case "regex":
            return GrammarText(GrammarForm.REGEX, grammar.regex)
        case _:
            raise InvalidRequest("response_format: a grammar of no known form")
