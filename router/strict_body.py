"""How the JSON of a request is read."""

from pydantic import BaseModel, ConfigDict


class StrictBody(BaseModel):
    """Types are strict and unknown fields are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, protected_namespaces=())
