"""`python -m router --model NAME|DIR --prefill HOST:PORT --decode HOST:PORT`"""

import argparse
import asyncio
import json
import logging
import signal
import sys
from collections.abc import Mapping, Sequence

import uvloop
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from model_store import ModelStoreError, resolve
from router import long_lived_heap
from router.config import RouterConfig
from router.router_server import RouterServer
from router.worker_directory import StaticDirectory
from security.tls_config import TlsConfig

# Given by --model, which also takes names.
_MODEL_FIELD = "model_path"


def parse_config(arguments: Sequence[str]) -> RouterConfig:
    """The configuration from command-line options: one for each field of `RouterConfig`, `--tls.cert` and
    so on for the fields of a section.

    Exits with a message on stderr when an option is wrong or the model cannot be had.
    """
    parser = _parser()
    options = vars(parser.parse_args(arguments))
    model = options.pop("model")
    try:
        return RouterConfig.model_validate({"model_path": resolve(model)} | _nested(options))
    except ValidationError as error:
        first = error.errors()[0]
        message = first["msg"].removeprefix("Value error, ")
        option = ".".join(str(part) for part in first["loc"]).replace("_", "-")
        parser.error(f"--{option}: {message}" if option else message)
    except ModelStoreError as error:
        parser.error(f"--model: {error}")


def _nested(options: Mapping[str, object]) -> dict[str, object]:
    """The options that were given, those of a section together under its name."""
    nested: dict[str, object] = {}
    sections: dict[str, dict[str, object]] = {}
    for name, value in options.items():
        if value is None:
            continue
        section, _, key = name.partition(".")
        if key:
            nested[section] = sections.setdefault(section, {})
            sections[section][key] = value
        else:
            nested[name] = value
    return nested


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m router",
        description="Baton's router: a gRPC and an OpenAI-compatible HTTP door before prefill and "
        "decode workers.",
    )
    parser.add_argument(
        "--model",
        default="smollm2-135m",
        metavar="NAME|DIR",
        help="A model's name, or its local Hugging Face folder; only its tokenizer is read. "
        "Default: smollm2-135m.",
    )
    for name, field in RouterConfig.model_fields.items():
        if name != _MODEL_FIELD:
            _add_option(parser, name, field)
    return parser


def _add_option(parser: argparse.ArgumentParser, name: str, field: FieldInfo) -> None:
    option, about = "--" + name.replace("_", "-"), (field.description or "").replace("%", "%%")
    if field.annotation == TlsConfig | None:
        for key, below in TlsConfig.model_fields.items():
            _add_option(parser, f"{name}.{key}", below)
    elif field.annotation is bool:
        parser.add_argument(option, action="store_const", const=True, help=about)
    elif field.annotation == tuple[str, ...]:
        repeat = "May be repeated, or several with commas between."
        parser.add_argument(option, action="extend", type=_split, metavar="ADDRESS", help=f"{about} {repeat}")
    else:
        has_default = field.default is not None and not field.is_required()
        default = f" Default: {field.default}." if has_default else ""
        parser.add_argument(option, metavar="VALUE", help=about + default)


def _split(value: str) -> list[str]:
    return [address.strip() for address in value.split(",") if address.strip()]


async def serve(config: RouterConfig) -> None:
    """Runs a router until SIGTERM or SIGINT, then drains; a second signal ends it at once."""
    signalled = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled.set)
    directory = StaticDirectory(prefill=config.prefill, decode=config.decode)
    server = await RouterServer.start(config, directory)
    long_lived_heap.settle()
    try:
        ready = {"event": "ready", "grpc": server.grpc_address, "http": server.http_address}
        print(json.dumps(ready), flush=True)
        await _first_of(server, signalled)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
        await server.drain(config.drain_limit_s)
    finally:
        await server.stop()


async def _first_of(server: RouterServer, signalled: asyncio.Event) -> None:
    """Returns at a signal; raises when the router fails."""
    waits = {asyncio.create_task(signalled.wait()), asyncio.create_task(server.failed())}
    try:
        done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in waits:
            task.cancel()


def main() -> None:
    # No line says them, and every request writes one.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    config = parse_config(sys.argv[1:])
    try:
        uvloop.run(serve(config))
    except (ValueError, OSError) as error:
        sys.exit(f"router: {error}")


if __name__ == "__main__":
    main()
