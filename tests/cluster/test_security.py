"""Conformance 25: without a valid key no token is computed; with TLS on, no plane is readable."""

import asyncio
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import httpx
import openai
import pytest
import torch

from decode_worker.server import DecodeWorker
from kv_transfer.bulk import SlotTerms
from kv_transfer.grpc_transport import FRAMES_METHOD
from kv_transfer.messages import Accepted, Grant, TransferId
from kv_transfer.outbound import HandoffOutbound, HandoffTicket
from kv_transfer.peers import PeerAddress, PeerPool
from kv_transfer.servicer import KvTransferService
from kv_transfer.transport import LinkBroken
from kv_transfer.transport_choice import Transports, transports_for
from protos import inference_pb2, inference_pb2_grpc, worker_pb2, worker_pb2_grpc
from router.__main__ import parse_config
from router.config import RouterConfig
from router.router_server import RouterServer
from router.worker_directory import StaticDirectory
from security.channel_security import ChannelSecurity, Plaintext, channel_security
from security.development_ca import issue, make_ca
from tests.cluster.local_cluster import LocalCluster, local_cluster
from tests.cluster.relay import Relay
from tests.cluster.router_bench import both_legs, started_router, token_request, until
from tests.cluster.scripted_worker import DEADLINE_S, ScriptedWorker
from tests.cluster.secured import BEARER, KEY, Certificates, SecuredCluster, computed_tokens, secured_cluster
from tests.device import DEVICE
from tests.engine.engines import prompt_of
from tests.transfer.prompts import Prompt, make_layout
from tests.transfer.sinks import MemoryDoor, MemorySink
from worker.config import WorkerConfig

ASKED = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0}
WRONG: list[dict[str, str]] = [
    {},
    {"authorization": "Bearer another-key"},
    {"authorization": f"Bearer {KEY}x"},
    {"authorization": "Bearer"},
    {"authorization": f"Basic {KEY}"},
    {"authorization": KEY},
]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates.make(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
async def keyed(tiny_model: Path, tmp_path: Path) -> AsyncIterator[LocalCluster]:
    """In plain; its router asks for `KEY`."""
    keys = tmp_path / "keys"
    keys.write_text(f"# of the tests\n{KEY}\n")
    async with local_cluster(tiny_model, router_options={"api_keys_file": keys}) as running:
        yield running


@pytest.fixture
async def secured(tiny_model: Path, tmp_path: Path) -> AsyncIterator[SecuredCluster]:
    async with secured_cluster(tiny_model, tmp_path) as running:
        yield running


async def test_without_a_valid_key_nothing_is_computed(keyed: LocalCluster) -> None:
    url = f"http://{keyed.router.http_address}"
    async with httpx.AsyncClient(base_url=url, timeout=DEADLINE_S) as client:
        for headers in WRONG:
            for body in (ASKED, ASKED | {"stream": True}):
                answer = await client.post("/v1/completions", json=body, headers=headers)
                assert answer.status_code == 401
                assert answer.json()["error"]["type"] == "authentication_error"
            call = keyed.client.Generate(token_request(), metadata=tuple(headers.items()), timeout=DEADLINE_S)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call.read()
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert await computed_tokens(*keyed.workers) == 0
        answered = await client.post("/v1/completions", json=ASKED, headers=BEARER)
        assert answered.json()["usage"]["completion_tokens"] == 4
    assert await computed_tokens(*keyed.workers) > 0


async def test_with_its_key_the_openai_client_streams(keyed: LocalCluster) -> None:
    url = f"http://{keyed.router.http_address}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0, timeout=60) as client:
        stream = await client.completions.create(**ASKED, stream=True, stream_options={"include_usage": True})
        *_, last = [chunk async for chunk in stream]
    assert last.usage is not None and last.usage.completion_tokens == 4


async def test_with_its_key_grpc_streams(keyed: LocalCluster) -> None:
    call = keyed.client.Generate(
        token_request(max_tokens=4, ignore_eos=True), metadata=tuple(BEARER.items()), timeout=DEADLINE_S
    )
    *_, last = [response async for response in call]
    assert last.usage.completion_tokens == 4


@pytest.fixture
async def scripted_keyed(
    tiny_model: Path, tmp_path: Path, scripted_prefill: ScriptedWorker, scripted_decode: ScriptedWorker
) -> AsyncIterator[tuple[RouterServer, Path]]:
    """A router that asks for `KEY`, and its file of keys."""
    keys = tmp_path / "keys.yaml"
    keys.write_text(f"[{{name: tests, key: {KEY}, max_concurrent_requests: 1}}]")
    directory = StaticDirectory(prefill=[scripted_prefill.address], decode=[scripted_decode.address])
    async with started_router(tiny_model, directory, api_keys_file=keys, stall_limit_s=300.0) as router:
        await until(router, lambda workers: len(workers) == 2)
        yield router, keys


@pytest.mark.parametrize(
    ("path", "without_key", "with_key"),
    [
        ("/v1/models", 401, 200),
        ("/workers", 401, 200),
        ("/tokenize", 401, 405),
        ("/detokenize", 401, 405),
        ("/no/such/page", 401, 404),
        ("/health", 200, 200),
        ("/metrics", 200, 200),
        ("/health/", 401, 307),
    ],
)
async def test_only_health_and_metrics_are_open(
    scripted_keyed: tuple[RouterServer, Path], path: str, without_key: int, with_key: int
) -> None:
    router, _ = scripted_keyed
    async with httpx.AsyncClient(base_url=f"http://{router.http_address}") as client:
        refused = await client.get(path)
        assert refused.status_code == without_key
        assert (refused.headers.get("www-authenticate") == "Bearer") == (without_key == 401)
        assert (await client.get(path, headers=BEARER)).status_code == with_key


async def test_every_method_of_grpc_but_health_needs_the_key(
    scripted_keyed: tuple[RouterServer, Path],
) -> None:
    router, _ = scripted_keyed
    async with grpc.aio.insecure_channel(router.grpc_address) as channel:
        for method in (
            "/baton.v1.Inference/ListModels",
            "/grpc.reflection.v1alpha.ServerReflection/x",
            "/x/y",
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await channel.unary_unary(method)(b"", timeout=DEADLINE_S)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        await channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=DEADLINE_S)
        stub = inference_pb2_grpc.InferenceStub(channel)
        models = await stub.ListModels(inference_pb2.ListModelsRequest(), metadata=tuple(BEARER.items()))
        assert [model.id for model in models.models] == ["tiny"]


async def test_a_key_that_is_added_opens_and_one_that_is_removed_closes(
    scripted_keyed: tuple[RouterServer, Path],
) -> None:
    router, keys = scripted_keyed
    new = {"authorization": "Bearer a-new-key"}
    async with httpx.AsyncClient(base_url=f"http://{router.http_address}") as client:
        assert (await client.get("/v1/models", headers=new)).status_code == 401
        keys.write_text("[{name: new, key: a-new-key}]")
        assert (await client.get("/v1/models", headers=new)).status_code == 200
        assert (await client.get("/v1/models", headers=BEARER)).status_code == 401


async def test_a_key_at_its_limit_is_told_when_to_come_back(
    scripted_keyed: tuple[RouterServer, Path],
    scripted_prefill: ScriptedWorker,
    scripted_decode: ScriptedWorker,
) -> None:
    router, _ = scripted_keyed
    async with (
        httpx.AsyncClient(base_url=f"http://{router.http_address}", headers=BEARER) as client,
        grpc.aio.insecure_channel(router.grpc_address) as channel,
    ):
        stub = inference_pb2_grpc.InferenceStub(channel)
        running = stub.Generate(token_request(max_tokens=4), metadata=tuple(BEARER.items()))
        _, decode = await both_legs(scripted_prefill, scripted_decode)
        refused = await client.post("/v1/completions", json=ASKED)
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        over = stub.Generate(token_request(), metadata=tuple(BEARER.items()), timeout=DEADLINE_S)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await over.read()
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        running.cancel()
        await decode.cancel_arrives()
        again = stub.Generate(token_request(), metadata=tuple(BEARER.items()), timeout=DEADLINE_S)
        _, decode = await both_legs(scripted_prefill, scripted_decode)
        decode.say_tokens(0, [100])
        assert (await again.read()).token_ids == [100]


async def test_a_cluster_with_tls_answers_at_both_doors(secured: SecuredCluster) -> None:
    *_, last = await secured.generate(token_request(prompt_of(40, seed=1), max_tokens=4, temperature=0))
    assert last.usage.completion_tokens == 4 and last.served_by.kv_bytes > 0
    async with secured.http() as client:
        assert (await client.post("/v1/completions", json=ASKED)).status_code == 401
        answered = await client.post("/v1/completions", json=ASKED, headers=BEARER)
        assert answered.json()["usage"]["completion_tokens"] == 4
        workers = (await client.get("/workers", headers=BEARER)).json()
    assert [worker["tls"] for worker in workers] == [True, True]


WORKER_METHODS = [
    "/baton.v1.Worker/Connect",
    "/baton.v1.Worker/Describe",
    "/baton.v1.KvTransfer/Handshake",
    "/baton.v1.KvTransfer/Push",
    "/baton.v1.KvTransfer/Bulk",
    FRAMES_METHOD,
    "/grpc.health.v1.Health/Check",
]


async def refusal(channel: grpc.aio.Channel, method: str) -> grpc.StatusCode:
    """How a call of any kind ends."""
    async with channel:
        return await channel.unary_unary(method)(b"", timeout=DEADLINE_S).code()


async def test_plaintext_reaches_nothing_of_a_worker(secured: SecuredCluster) -> None:
    for method in WORKER_METHODS:
        channel = grpc.aio.insecure_channel(secured.decode.address)
        assert await refusal(channel, method) is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("shown", [None, "client"])
async def test_a_worker_takes_only_certificates_of_its_ca(secured: SecuredCluster, shown: str | None) -> None:
    """Clients' certificates come from another."""
    for method in WORKER_METHODS:
        credentials = secured.certificates.client_credentials(shown)
        channel = grpc.aio.secure_channel(secured.decode.address, credentials)
        assert await refusal(channel, method) is grpc.StatusCode.UNAVAILABLE
    router = grpc.aio.secure_channel(
        secured.decode.address, secured.certificates.client_credentials("router")
    )
    async with router:
        description = await worker_pb2_grpc.WorkerStub(router).Describe(worker_pb2.DescribeRequest())
    assert description.tls


async def test_plaintext_reaches_neither_door(secured: SecuredCluster) -> None:
    async with httpx.AsyncClient() as client:
        with pytest.raises(httpx.TransportError):
            await client.get(f"http://{secured.router.http_address}/health")
        with pytest.raises(httpx.TransportError):
            await client.get(f"http://{secured.decode.metrics_address}/metrics")
    channel = grpc.aio.insecure_channel(secured.router.grpc_address)
    method = "/baton.v1.Inference/ListModels"
    assert await refusal(channel, method) is grpc.StatusCode.UNAVAILABLE


async def test_a_plain_router_gets_no_session_with_a_worker_that_has_tls(
    secured: SecuredCluster, tiny_model: Path
) -> None:
    directory = StaticDirectory(decode=[secured.decode.address])
    async with started_router(tiny_model, directory) as router, asyncio.timeout(DEADLINE_S):
        seen = 0
        while not any(status.state == "lost" for status in router.fleet.statuses()):
            seen = await router.fleet.next_change(seen)
        assert router.fleet.snapshot() == ()


async def test_a_plain_sender_hands_nothing_to_a_receiver_that_has_tls(secured: SecuredCluster) -> None:
    decode = secured.decode
    peers = PeerPool(decode.layout, "prefill-x", epoch=1)
    with pytest.raises(LinkBroken):
        await peers.acquire(PeerAddress(decode.address, decode.epoch))
    await peers.close()


async def test_a_sender_with_tls_tells_nothing_to_a_plain_receiver(certificates: Certificates) -> None:
    """Or to one with a certificate of another CA: both are refused before the handshake's first word."""
    layout = make_layout()
    for security in (Plaintext(), _security_of_another_ca(certificates)):
        server = grpc.aio.server()
        KvTransferService(MemoryDoor(1), layout, Grant(4, 700), worker_id="d", epoch=1).add_to(server)
        port = security.listen(server, "127.0.0.1:0")
        await server.start()
        peers = PeerPool(layout, "p", epoch=1, security=channel_security(certificates.tls("worker")))
        with pytest.raises(LinkBroken):
            await peers.acquire(PeerAddress(f"127.0.0.1:{port}", 1))
        await peers.close()
        await server.stop(None)


def _security_of_another_ca(certificates: Certificates) -> ChannelSecurity:
    folder = certificates.folder / "another"
    return channel_security(Certificates.make(folder).tls("worker"))


@pytest.mark.parametrize("is_secured", [False, True])
async def test_kv_bytes_can_be_read_on_the_wire_only_without_tls(
    certificates: Certificates, is_secured: bool
) -> None:
    """Without TLS too, so that a search that could never find them would show."""
    security = channel_security(certificates.tls("worker") if is_secured else None)
    prompt = Prompt.random(make_layout(), 40)
    door, transfer, secret = MemoryDoor(epoch=1), TransferId("session", 1), b"a secret of it"
    await door.connect("session")
    sink = MemorySink(prompt.layout, prompt.num_tokens)
    await door.submit(transfer, secret, sink)
    server = grpc.aio.server()
    service = KvTransferService(door, prompt.layout, Grant(4, 4096), worker_id="decode", epoch=1)
    service.add_to(server)
    port = security.listen(server, "127.0.0.1:0")
    await server.start()
    peers = PeerPool(prompt.layout, "prefill", epoch=1, security=security)
    async with Relay(f"127.0.0.1:{port}") as relay:
        ticket = HandoffTicket(
            receiver=PeerAddress(relay.address, 1),
            transfer=transfer,
            secret=secret,
            num_tokens=prompt.num_tokens,
        )
        outbound = HandoffOutbound(peers, ticket)
        await outbound.open()
        pieces = list(prompt.pieces(16))
        for piece in pieces:
            outbound.offer(piece.layer, piece.token_start, piece.token_end, piece.data)
        outbound.commit((7,))
        assert await outbound.outcome == Accepted(prompt.kv_bytes)
        await peers.close()
        await service.close()
        await server.stop(None)
    assert prompt.equals(sink.kv)
    readable = [bytes(piece.data[:64]) in relay.seen for piece in pieces]
    assert readable == [not is_secured] * len(pieces)
    assert (secret in relay.seen) == (not is_secured)
    assert len(relay.seen) > prompt.kv_bytes


def test_with_tls_auto_takes_nothing_that_cannot_encrypt() -> None:
    slots = SlotTerms(4, 1 << 20)
    every_way = Transports((*transports_for("gloo", slots).bulk, *transports_for("auto", slots).bulk))
    assert every_way.names == ("gloo", "shm", "grpc")
    assert every_way.encrypted.names == ("shm", "grpc")
    assert transports_for("auto", slots).names == ("shm", "grpc")
    on_gpu = transports_for("auto", slots, device=torch.device("cuda"))
    assert on_gpu.encrypted.names == ("ipc", "shm", "grpc")


@pytest.mark.parametrize("transport", ["gloo", "nccl"])
def test_with_tls_what_cannot_encrypt_needs_a_trusted_network_and_says_so(
    tiny_model: Path, certificates: Certificates, transport: str
) -> None:
    options = {
        "model_path": tiny_model,
        "tls": certificates.tls("worker"),
        "kv_transport": transport,
    }
    with pytest.raises(ValueError, match=f"{transport} cannot encrypt: .*--kv-trusted-network"):
        WorkerConfig(**options)
    assert WorkerConfig(**options, kv_trusted_network=True).may_send_plain_kv


async def test_a_router_shows_which_workers_trust_their_network(
    tiny_model: Path, certificates: Certificates
) -> None:
    config = WorkerConfig(
        model_path=tiny_model,
        model_name="tiny",
        device=str(DEVICE),
        dtype="float32",
        kv_cache_bytes=16 << 20,
        tls=certificates.tls("worker"),
        kv_transport="gloo",
        kv_trusted_network=True,
    )
    worker = await DecodeWorker.start(config)
    directory = StaticDirectory(decode=[worker.address])
    async with started_router(tiny_model, directory, tls=certificates.tls("router")) as router:
        await until(router, lambda workers: len(workers) == 1)
        (status,) = router.fleet.statuses()
    await worker.stop()
    assert (status.tls, status.kv_trusted_network) == (True, True)


async def test_a_door_with_a_client_ca_takes_only_its_certificates(
    tiny_model: Path, certificates: Certificates
) -> None:
    folder = certificates.folder
    settings = {"tls": certificates.tls("router"), "client_ca": folder / "clients-ca.pem"}
    trusted = ssl.create_default_context(cafile=folder / "ca.pem")
    known = ssl.create_default_context(cafile=folder / "ca.pem")
    known.load_cert_chain(folder / "client.pem", folder / "client.key")
    method = "/baton.v1.Inference/ListModels"
    async with started_router(tiny_model, StaticDirectory(), **settings) as router:
        url = f"https://{router.http_address}/metrics"
        async with httpx.AsyncClient(verify=trusted) as client:
            with pytest.raises(httpx.TransportError):
                await client.get(url)
        async with httpx.AsyncClient(verify=known) as client:
            assert (await client.get(url)).status_code == 200
        for name, code in ((None, "UNAVAILABLE"), ("worker", "UNAVAILABLE"), ("client", "OK")):
            credentials = certificates.client_credentials(name)
            channel = grpc.aio.secure_channel(router.grpc_address, credentials)
            async with channel:
                call = channel.unary_unary(method)(b"", timeout=DEADLINE_S)
                assert (await call.code()).name == code


async def test_a_worker_is_known_by_its_name_where_its_address_is_not_in_its_certificate(
    tmp_path: Path,
) -> None:
    ca = make_ca("of this test")
    ca.write(tmp_path, "ca")
    issue(ca, "worker", ["baton-worker"]).write(tmp_path, "worker")
    named = Certificates(tmp_path)
    server = grpc.aio.server()
    port = channel_security(named.tls("worker")).listen(server, "127.0.0.1:0")
    await server.start()
    for tls, code in (
        (named.tls("worker"), grpc.StatusCode.UNAVAILABLE),
        (named.tls("worker", worker_name="baton-worker"), grpc.StatusCode.UNIMPLEMENTED),
    ):
        channel = channel_security(tls).connect(f"127.0.0.1:{port}", ())
        assert await refusal(channel, "/x/y") is code
    await server.stop(None)


WIDE = ["0.0.0.0", "::", "10.1.2.3", "router.example"]


@pytest.mark.parametrize("host", WIDE)
def test_a_router_listens_beyond_loopback_only_with_keys_or_when_told_so(
    tiny_model: Path, tmp_path: Path, host: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--model", str(tiny_model), "--host", host]
    with pytest.raises(SystemExit):
        parse_config(options)
    (told,) = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert host in told and "--api-keys-file" in told and "--insecure" in told
    assert parse_config([*options, "--insecure"]).host == host
    assert parse_config([*options, "--api-keys-file", str(tmp_path / "keys")]).host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "localhost", "::1"])
def test_loopback_needs_nothing(tiny_model: Path, host: str) -> None:
    assert RouterConfig(model_path=tiny_model, host=host).host == host


def test_a_worker_beyond_loopback_without_tls_is_one_clear_error(tiny_model: Path) -> None:
    command = [sys.executable, "-m", "decode_worker", "--model", str(tiny_model), "--host", "0.0.0.0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 1 and ended.stdout == ""
    (told,) = ended.stderr.splitlines()
    assert "0.0.0.0" in told and "--tls.cert" in told and "--insecure" in told


async def test_a_certificate_that_is_not_there_is_one_clear_error(
    tiny_model: Path, certificates: Certificates
) -> None:
    tls = certificates.tls("router").model_copy(update={"key": certificates.folder / "none.key"})
    with pytest.raises(OSError, match=r"none\.key: No such file"):
        await RouterServer.start(RouterConfig(model_path=tiny_model, tls=tls), StaticDirectory())
