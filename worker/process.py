"""A worker as a process of its own: options, one line when it is ready, SIGTERM drains."""

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop
from pydantic import Field, ValidationError, field_validator
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    CliApp,
    CliSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

import model_store
from worker.config import WorkerConfig

if TYPE_CHECKING:
    from worker.server import WorkerServer

log = logging.getLogger(__name__)


class WorkerOptions(BaseSettings, WorkerConfig):  # pyright: ignore[reportIncompatibleVariableOverride]
    """The configuration as command-line options, and from nowhere else."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        protected_namespaces=(),
        cli_kebab_case=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        cli_enforce_required=True,
        cli_implicit_flags="toggle",
        populate_by_name=True,
    )

    model_path: Path = Field(
        default=Path("smollm2-135m"),
        validation_alias="model",
        validate_default=True,
        description="smollm2-135m, a local Hugging Face folder, a GGUF file or a hub id.",
    )

    @field_validator("model_path", mode="before")
    @classmethod
    def _resolve(cls, model: str | Path) -> Path:
        try:
            return model_store.resolve(str(model))
        except model_store.ModelStoreError as error:
            raise ValueError(str(error)) from error

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)


def configure_threads(config: WorkerConfig) -> None:
    """Pins the process and sets how many threads compute. To be called before torch is imported.

    Threads wait passively: two processes whose threads spin on the same cores run tens of times slower.
    """
    if config.cores:
        os.sched_setaffinity(0, config.cores)
    threads = config.threads or len(os.sched_getaffinity(0))
    os.environ |= {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}


def main(program: str, description: str, worker_class: Callable[[], type["WorkerServer"]]) -> None:
    """Runs a worker until SIGTERM or SIGINT.

    Args:
        worker_class: imports and returns it, which brings torch along.
    """
    options = _parse(program, description)
    configure_threads(options)
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    served = worker_class()
    from engine.model_config import ModelError
    from kv_transfer.transport_choice import TransferConfigError

    try:
        failed = uvloop.run(_serve(served, options))
    except (OSError, ModelError, TransferConfigError) as error:
        sys.exit(f"{program}: {error}")
    # A thread may hang in a device or a library, where an interpreter that ends in order waits or aborts.
    logging.shutdown()
    sys.stdout.flush()
    os._exit(1 if failed else 0)


def _parse(program: str, description: str) -> WorkerOptions:
    named = type("Options", (WorkerOptions,), {"__doc__": description})
    source = CliSettingsSource(named, cli_prog_name=program)
    try:
        return CliApp.run(named, cli_settings_source=source)
    except ValidationError as error:
        sys.exit("\n".join(f"{program}: {_explain(each)}" for each in error.errors()))


def _explain(error: ErrorDetails) -> str:
    message = error["msg"].removeprefix("Value error, ")
    option = ".".join(str(part) for part in error["loc"]).replace("_", "-")
    return f"--{option}: {message}" if option else message


async def _serve(worker_class: type["WorkerServer"], config: WorkerConfig) -> bool:
    """Returns whether the engine failed."""
    leave = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, leave.set)
    worker = await worker_class.start(config)
    ready = {
        "event": "ready",
        "worker_id": worker.worker_id,
        "grpc": worker.address,
        "metrics": worker.metrics_address,
    }
    print(json.dumps(ready), flush=True)
    failed = asyncio.create_task(worker.wait_failed())
    leaving = asyncio.create_task(leave.wait())
    await asyncio.wait([failed, leaving], return_when=asyncio.FIRST_COMPLETED)
    if not failed.done():
        log.info("draining, for at most %.0f s", config.drain_limit_s)
        await worker.drain(config.drain_limit_s)
    leaving.cancel()
    await worker.stop()
    return failed.done() and failed.result() is not None
