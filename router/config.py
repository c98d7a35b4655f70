"""What a router can be told."""

from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from security.exposure import is_loopback
from security.tls_config import LocalFile, TlsConfig

ToolCallFormat = Literal["auto", "hermes", "llama3", "none"]


class RouterConfig(BaseModel):
    """The front doors and how requests are placed."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model_path: Path = Field(
        description="A local Hugging Face folder; its tokenizer, chat template and config.json are read."
    )
    model_name: str | None = Field(default=None, description="Shown to clients. Default: the folder's name.")
    host: str = Field(default="127.0.0.1", description="Address the doors listen on.")
    grpc_port: int = Field(
        default=0, ge=0, le=65535, description="Of the gRPC door. 0: the system picks one."
    )
    http_port: int = Field(
        default=0, ge=0, le=65535, description="Of the OpenAI-compatible door. 0: the system picks one."
    )
    prefill: tuple[str, ...] = Field(default=(), description="host:port of each prefill worker.")
    decode: tuple[str, ...] = Field(default=(), description="host:port of each decode worker.")
    stall_limit_s: float = Field(
        default=10.0, gt=0, description="A worker silent for longer loses its session and its requests."
    )
    drain_limit_s: float = Field(
        default=60.0, ge=0, description="After SIGTERM: how long running streams may take to finish."
    )
    max_attempts: int = Field(
        default=4, ge=1, description="Attempts in a row without a new token before a request gets its error."
    )
    rejoin_limit_s: float = Field(
        default=5.0,
        ge=0,
        description="How long a request that lost its workers waits for a listed one to come back, when none "
        "is left.",
    )
    local_prefill_tokens: int = Field(
        default=0,
        ge=0,
        description="A prompt of which the decode worker lacks at most this many tokens is always prefilled "
        "there: no hand-off.",
    )
    decode_prefill_tokens: int = Field(
        default=128,
        ge=0,
        description="A prompt of which a decode worker has cached most and lacks at most this many tokens is "
        "prefilled there if that costs least.",
    )
    loaded_prefill_s: float = Field(
        default=2.0,
        ge=0,
        description="While a prompt would wait longer than this for a prefill worker, decode workers prefill "
        "too where that costs less.",
    )
    max_expected_ttft_s: float = Field(
        default=60.0,
        gt=0,
        description="A request whose first token is expected later than this is refused at once.",
    )
    max_queued_requests: int = Field(
        default=1024, ge=1, description="Requests that may wait in the router; more are refused at once."
    )
    max_inflight_prompt_tokens: int = Field(
        default=8192,
        ge=1,
        description="Prompt tokens that this router lets one worker have before it. Other requests wait in "
        "the router, where their order can still change.",
    )
    tool_call_format: ToolCallFormat = Field(
        default="auto",
        description="How the model writes tool calls. auto: as its chat template; none: not read.",
    )
    api_keys_file: LocalFile | None = Field(
        default=None,
        description="Keys that clients must show: one on each line, or a YAML file with limits. "
        "Default: none is asked for.",
    )
    tls: TlsConfig | None = Field(
        default=None,
        description="Encrypts the doors and the sessions with workers: the PEM files cert, key and ca. "
        "`baton certs` makes some for tests.",
    )
    client_ca: LocalFile | None = Field(
        default=None, description="The doors take only clients with a certificate of this CA. PEM."
    )
    insecure: bool = Field(
        default=False, description="Listen beyond loopback though clients need neither key nor certificate."
    )

    @model_validator(mode="after")
    def _is_safe(self) -> Self:
        if self.client_ca is not None and self.tls is None:
            raise ValueError("client_ca: needs tls")
        knows_clients = self.api_keys_file is not None or self.client_ca is not None
        if not (is_loopback(self.host) or knows_clients or self.insecure):
            raise ValueError(
                f"host: {self.host} can be reached from other machines, and clients need no key: give the "
                "router --api-keys-file (docs/security.md), let it listen on 127.0.0.1, or say --insecure"
            )
        return self
