"""What a worker can be told."""

from typing import Literal, Self

from pydantic import Field, model_validator

from engine.config import EngineConfig
from security.exposure import is_loopback
from security.tls_config import TlsConfig

# Ways for KV that cannot encrypt.
PLAIN_TRANSPORTS = frozenset({"nccl", "gloo", "nixl"})


class WorkerConfig(EngineConfig):
    """An engine with a server around it, the same for both roles."""

    model_name: str | None = Field(default=None, description="Shown to clients. Default: the folder's name.")
    host: str = Field(default="127.0.0.1", description="Address to listen on, and to be reached at.")
    port: int = Field(default=0, ge=0, le=65535, description="Of the gRPC server. 0: the system picks one.")
    metrics_port: int = Field(
        default=0, ge=0, le=65535, description="Of Prometheus' /metrics, HTTP. 0: the system picks one."
    )
    worker_id: str | None = Field(
        default=None, description="Unique in the cluster. Default: role and random."
    )
    threads: int | None = Field(
        default=None, ge=1, description="Threads that compute, on a CPU. Default: the cores it may run on."
    )
    cores: tuple[int, ...] = Field(default=(), description="Cores to pin the process to. Default: all.")
    drain_limit_s: float = Field(
        default=60.0,
        ge=0,
        description="After SIGTERM: how long running requests may take to finish. Routers then continue them "
        "on other workers.",
    )
    step_limit_s: float = Field(
        default=300.0,
        gt=0,
        description="A worker whose engine works on one step for longer than any could take ends itself.",
    )
    kv_transport: Literal["auto", "shm", "ipc", "nccl", "gloo", "nixl", "grpc"] = Field(
        default="auto",
        description="How KV goes to and from other workers: auto takes ipc (GPUs) or shm on one machine, "
        "else grpc. "
        "Another name forces that one; a pair that cannot use it is refused when it connects.",
    )
    kv_conversion: bool = Field(
        default=False,
        description="Take KV of the same model in another dtype than this worker's cache has, and convert "
        "it. Otherwise such a pair is refused when it connects.",
    )
    kv_slots: int = Field(
        default=16,
        ge=1,
        description="Slots that a sender writes KV frames into, for each worker that it hands off to by "
        "another way than grpc. Slots times their size bound that pair's staging memory; ipc and nccl take "
        "it of the GPU, all at once.",
    )
    kv_slot_bytes: int = Field(default=4 << 20, ge=4096, multiple_of=4096, description="Size of a slot.")
    kv_staging_bytes: int = Field(
        default=1 << 30,
        ge=0,
        description="GPU memory, beside the slots, for KV that waits to be sent by ipc or nccl. What is more "
        "waits in pinned memory of the host.",
    )
    frame_credits: int = Field(
        default=16,
        ge=1,
        description="KV frames of one hand-off that may be under way: bounds the staging memory.",
    )
    max_frame_bytes: int = Field(
        default=(4 << 20) + 4096,
        ge=4096,
        description="Largest KV frame that is received: bounds the staging memory.",
    )
    tls: TlsConfig | None = Field(
        default=None,
        description="Encrypts the sessions with routers and the KV, and lets only holders of a certificate "
        "of the CA in: the PEM files cert, key and ca. `baton certs` makes some for tests.",
    )
    kv_trusted_network: bool = Field(
        default=False,
        description="With TLS: KV may all the same be handed over by nccl, gloo or nixl, which cannot "
        "encrypt.",
    )
    insecure: bool = Field(default=False, description="Listen beyond loopback though there is no TLS.")

    @model_validator(mode="after")
    def _is_safe(self) -> Self:
        if not (is_loopback(self.host) or self.tls is not None or self.insecure):
            raise ValueError(
                f"host: {self.host} can be reached from other machines, and anybody there could use this "
                "worker: give it --tls.cert, --tls.key and --tls.ca (docs/security.md), let it listen on "
                "127.0.0.1, or say --insecure"
            )
        if self.kv_transport in PLAIN_TRANSPORTS and not self.may_send_plain_kv:
            raise ValueError(
                f"kv_transport: {self.kv_transport} cannot encrypt: with TLS it is used only where "
                "--kv-trusted-network says that nobody listens there"
            )
        return self

    @property
    def may_send_plain_kv(self) -> bool:
        """Over a network; memory that processes share is another matter."""
        return self.tls is None or self.kv_trusted_network
