"""Which certificates a process shows and which it trusts."""

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


def _absolute(path: Path) -> Path:
    """Of this moment: a worker that Ray starts has another working directory."""
    return path.expanduser().absolute()


LocalFile = Annotated[Path, AfterValidator(_absolute)]


class TlsConfig(BaseModel):
    """One identity, the same whether the process listens or connects. All files are PEM."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cert: LocalFile = Field(
        description="Certificate of this process, and any between it and its CA. For server and client use."
    )
    key: LocalFile = Field(description="Its private key, without a password.")
    ca: LocalFile = Field(description="CA of the routers and workers: nobody else may talk to a worker.")
    worker_name: str | None = Field(
        default=None,
        description="Looked for in the certificates of workers instead of the address that is dialled.",
    )
