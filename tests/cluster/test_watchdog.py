"""An engine that has work and makes no step ends its worker."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from decode_worker.server import DecodeWorker
from tests.device import DEVICE
from worker.config import WorkerConfig
from worker.engine_thread import EngineFailed, EngineStuck

# A decode worker whose engine hangs as soon as it is asked for anything.
HANGING = """
import threading
from decode_worker.server import DecodeWorker
from worker.process import main

class Hanging(DecodeWorker):
    async def _start(self):
        await super()._start()
        self.engine.post(lambda engine: threading.Event().wait())

main("hanging", "", lambda: Hanging)
"""


async def test_it_fails_and_every_call_with_it(tiny_model: Path) -> None:
    config = WorkerConfig(model_path=tiny_model, dtype="float32", device=str(DEVICE), step_limit_s=0.2)
    worker = await DecodeWorker.start(config)
    release = threading.Event()
    worker.engine.post(lambda engine: release.wait())
    with pytest.raises(EngineFailed):
        await worker.engine.call(lambda engine: engine.load())
    assert isinstance(await worker.wait_failed(), EngineStuck)
    with pytest.raises(RuntimeError, match="no step"):
        worker.check_health()
    await worker.stop()
    release.set()


async def test_an_idle_engine_is_not_stuck(tiny_model: Path) -> None:
    config = WorkerConfig(model_path=tiny_model, dtype="float32", device=str(DEVICE))
    worker = await DecodeWorker.start(config)
    worker.engine.give_up_after(0)
    assert await worker.engine.call(lambda engine: engine.load().num_running) == 0
    await worker.stop()


def test_its_process_ends(tiny_model: Path) -> None:
    options = ["--model", str(tiny_model), "--dtype", "float32", "--step-limit-s", "0.5"]
    run = subprocess.run(
        [sys.executable, "-c", HANGING, *options], capture_output=True, text=True, timeout=200, check=False
    )
    assert run.returncode == 1
    assert "no step has ended" in run.stderr
