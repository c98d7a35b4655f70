"""What a cluster can be told: one model, one YAML format."""

import difflib
import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, Self, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model, model_validator
from pydantic.fields import FieldInfo

from router.config import RouterConfig
from worker.config import WorkerConfig

Pool = Literal["prefill", "decode"]
POOLS: tuple[Pool, ...] = ("prefill", "decode")

# What the deployment decides for every worker and router, so that no file says it.
_WORKER_DECIDED = {
    "model_path",
    "model_name",
    "host",
    "port",
    "metrics_port",
    "worker_id",
    "threads",
    "cores",
}
_ROUTER_DECIDED = {"model_path", "model_name", "prefill", "decode"}

_STRICT = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class ConfigError(Exception):
    """A configuration that cannot be used. The message names the file and the key."""


def _message(error: ValidationError) -> str:
    return error.errors()[0]["msg"].removeprefix("Value error, ")


def _fields(model: type[BaseModel], without: set[str]) -> dict[str, tuple[object, FieldInfo]]:
    fields = {name: field for name, field in model.model_fields.items() if name not in without}
    return {name: (field.annotation, field) for name, field in fields.items()}


def _options(name: str, of: type[BaseModel], without: set[str], doc: str) -> type[BaseModel]:
    """The fields of `of`, documented there, except those that the deployment decides."""
    return create_model(name, __config__=_STRICT, __doc__=doc, **_fields(of, without))  # pyright: ignore[reportCallIssue, reportArgumentType]


WorkerOptions = _options(
    "WorkerOptions", WorkerConfig, _WORKER_DECIDED, "An engine and the server around it."
)
RouterOptions = _options("RouterOptions", RouterConfig, _ROUTER_DECIDED, "One router: its doors and limits.")


class PoolConfig(BaseModel):
    """One pool of equal workers."""

    model_config = _STRICT

    workers: int = Field(default=1, ge=1, description="How many at the start; `baton scale` changes it.")
    cores: int | None = Field(
        default=None,
        ge=1,
        description="Cores of each worker, its own: asked of Ray and pinned. Default: the workers of a "
        "machine divide its cores, and more workers than cores share them.",
    )
    gpus: float | None = Field(
        default=None,
        ge=0,
        description="GPUs of each worker. Default: one each, a fraction where there are fewer GPUs than "
        "workers, none where there is none.",
    )
    worker: WorkerOptions = Field(  # pyright: ignore[reportInvalidTypeForm]
        default_factory=WorkerOptions,
        description="What differs in this pool from `worker` below.",
    )


class PoolsConfig(BaseModel):
    """The two phases."""

    model_config = _STRICT

    prefill: PoolConfig = Field(default_factory=PoolConfig, description="Reads prompts.")
    decode: PoolConfig = Field(default_factory=PoolConfig, description="Writes tokens.")


class RoutersConfig(RouterOptions):  # pyright: ignore[reportGeneralTypeIssues, reportUntypedBaseClass]
    """The front doors: at most one router to a node."""

    grpc_port: int = Field(
        default=50051, ge=0, le=65535, description="Of the gRPC door. 0: the system picks one."
    )
    http_port: int = Field(
        default=8000, ge=0, le=65535, description="Of the OpenAI-compatible door. 0: the system picks one."
    )
    replicas: int = Field(default=1, ge=1, description="Routers, each on a node of its own.")
    cpus: float = Field(default=0, ge=0, description="Asked of Ray for each router; it needs almost none.")


class ClusterConfig(BaseModel):
    """One model, served by two pools behind routers."""

    model_config = _STRICT

    model: str = Field(
        default="smollm2-135m",
        description="A built-in name, a local Hugging Face folder, a GGUF file or a hub id.",
    )
    model_name: str | None = Field(
        default=None, description="Shown to clients. Default: `model`, of a folder or file its name."
    )
    ray_address: str | None = Field(
        default=None,
        description="Ray cluster to join, host:port. Default: one is started on this machine.",
    )
    pools: PoolsConfig = Field(default_factory=PoolsConfig, description="The two pools.")
    worker: WorkerOptions = Field(  # pyright: ignore[reportInvalidTypeForm]
        default_factory=WorkerOptions, description="Every worker, of both pools."
    )
    router: RoutersConfig = Field(default_factory=RoutersConfig, description="The front doors.")

    @property
    def served_name(self) -> str:
        """What clients call the model."""
        if self.model_name:
            return self.model_name
        path = Path(self.model).expanduser()
        if path.is_dir():
            return path.resolve().name
        return path.stem if path.suffix == ".gguf" else self.model

    def pool(self, pool: Pool) -> PoolConfig:
        return self.pools.prefill if pool == "prefill" else self.pools.decode

    def worker_config(self, pool: Pool) -> WorkerConfig:
        """What both pools are told, with what differs in this one. The model's path is not resolved."""
        options = self.worker.model_dump() | self.pool(pool).worker.model_dump(exclude_unset=True)
        return WorkerConfig.model_validate(
            {"model_path": self.model, "model_name": self.served_name} | options
        )

    def router_config(self) -> RouterConfig:
        """The model's path is not resolved."""
        options = self.router.model_dump(exclude={"replicas", "cpus"})
        return RouterConfig.model_validate(
            {"model_path": self.model, "model_name": self.served_name} | options
        )

    @property
    def tls_ca(self) -> Path | None:
        """Of the doors' certificate. None: they are in plain."""
        tls = self.router_config().tls
        return None if tls is None else tls.ca

    def check_workers_at(self, addresses: Iterable[str]) -> None:
        """
        Args:
            addresses: of the machines where workers will listen.

        Raises:
            ConfigError: one can be reached from other machines, and nothing protects its workers.
        """
        for pool, host in itertools.product(POOLS, sorted(addresses)):
            try:
                WorkerConfig.model_validate(self.worker_config(pool).model_dump() | {"host": host})
            except ValidationError as error:
                raise ConfigError(f"worker: {_message(error)}") from error

    @model_validator(mode="after")
    def _is_safe(self) -> Self:
        try:
            router = self.router_config()
        except ValidationError as error:
            raise ValueError(f"router: {_message(error)}") from error
        for pool in POOLS:
            if (router.tls is None) != (self.worker_config(pool).tls is None):
                raise ValueError("tls: give it to both router and worker, or to neither")
        return self

    @model_validator(mode="after")
    def _pools_can_hand_over(self) -> Self:
        prefill, decode = (self.worker_config(pool) for pool in POOLS)
        if prefill.max_model_len != decode.max_model_len:
            raise ValueError(
                f"max_model_len must be the same in both pools, not {prefill.max_model_len} and "
                f"{decode.max_model_len}"
            )
        if not decode.kv_conversion and prefill.sent_kv_dtype != decode.cached_kv_dtype:
            raise ValueError(
                f"the prefill pool hands off KV in {prefill.sent_kv_dtype}, the decode pool keeps it in "
                f"{decode.cached_kv_dtype}: make them the same, or let the decode pool convert it "
                "(pools.decode.worker.kv_conversion: true)"
            )
        return self


def load_config(path: Path) -> ClusterConfig:
    """Reads a YAML file.

    Raises:
        ConfigError: it cannot be read, or a key is unknown or its value is out of range.
    """
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {error}") from error
    if content is not None and not isinstance(content, dict):
        raise ConfigError(f"{path}: keys and values are expected, not a {type(content).__name__}")
    return parse_config(content or {}, str(path))


def parse_config(content: dict[str, object], source: str) -> ClusterConfig:
    """Checks the content of a file; `source` names it in errors.

    Raises:
        ConfigError: a key is unknown or its value is out of range.
    """
    try:
        return ClusterConfig.model_validate(content)
    except ValidationError as error:
        raise ConfigError("\n".join(f"{source}: {_explain(item)}" for item in error.errors())) from error


def _explain(error: object) -> str:
    assert isinstance(error, dict)
    location = tuple(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return f"unknown key {'.'.join(location)!r}{_suggestion(location)}"
    where, message = ".".join(location), str(error["msg"]).removeprefix("Value error, ")
    return f"{where}: {message}" if where else message


def _suggestion(location: tuple[str, ...]) -> str:
    model: type[BaseModel] = ClusterConfig
    for part in location[:-1]:
        section = _section(model.model_fields[part])
        if section is None:
            return ""
        model = section
    near = difflib.get_close_matches(location[-1], model.model_fields, n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _section(field: FieldInfo) -> type[BaseModel] | None:
    for each in (field.annotation, *get_args(field.annotation)):
        if isinstance(each, type) and issubclass(each, BaseModel):
            return each
    return None


def render_config(config: ClusterConfig) -> str:
    """The configuration as YAML, every key under a comment that says what it does."""
    return "\n".join(_render_section(config, "")) + "\n"


def _render_section(config: BaseModel, indent: str) -> list[str]:
    lines: list[str] = []
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        lines.append(f"{indent}# {field.description}")
        if not isinstance(value, BaseModel):
            lines.append(f"{indent}{name}: {_scalar(value)}")
        elif isinstance(config, PoolConfig):
            lines.append(f"{indent}{name}: {_scalar(value.model_dump(mode='json', exclude_unset=True))}")
        else:
            lines += [f"{indent}{name}:", *_render_section(value, indent + "  ")]
    return lines


def _scalar(value: object) -> str:
    plain = str(value) if isinstance(value, Path) else value
    return (
        yaml.safe_dump(plain, default_flow_style=True, width=10_000).removesuffix("\n").removesuffix("\n...")
    )
