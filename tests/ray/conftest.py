"""One cluster under Ray for all tests here: one prefill and one decode worker with a tiny model."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from deploy.client import InferenceClient
from protos import inference_pb2
from tests.ray.baton_command import Baton, processes_of


@dataclass(slots=True, frozen=True)
class RunningCluster:
    """`baton up` has returned."""

    baton: Baton
    session: int

    def ask(self, prompt: str, max_tokens: int = 8) -> inference_pb2.ServedBy:
        """Who served a request."""
        request = inference_pb2.GenerateRequest(
            text=prompt,
            sampling=inference_pb2.SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True),
        )
        (state,) = self.baton.states()
        with InferenceClient(state["grpc_address"]) as client:
            *_, last = client.generate(request)
        assert last.usage.completion_tokens == max_tokens
        return last.served_by


@pytest.fixture(scope="session")
def baton(tmp_path_factory: pytest.TempPathFactory) -> Baton:
    return Baton(tmp_path_factory.mktemp("baton-home"))


@pytest.fixture(scope="session")
def cluster(baton: Baton, tiny_model: Path) -> Iterator[RunningCluster]:
    baton.run(
        *("up", "--model", str(tiny_model), "--dtype", "float32", "--http-port", "0", "--grpc-port", "0")
    )
    (state,) = baton.states()
    yield RunningCluster(baton, state["head_pid"])
    assert processes_of(state["head_pid"])
    baton.run("down")
    assert processes_of(state["head_pid"]) == []
    assert list(baton.home.iterdir()) == []
    assert not Path(state["ray_folder"]).exists()
