"""What the router knows of the model before any worker speaks."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from router.tokenizer import read_json_object


@dataclass(frozen=True, slots=True)
class ModelCard:
    """Of config.json.

    Attributes:
        name: what clients call the model.
        vocab_size: token ids are smaller. None: the file does not say.
        max_model_len: prompt and generated tokens together, by the checkpoint. None: it does not say.
    """

    name: str
    vocab_size: int | None
    max_model_len: int | None

    @classmethod
    def read(cls, folder: Path, name: str | None) -> "ModelCard":
        """
        Raises:
            ValueError: config.json is missing or damaged.
        """
        config = read_json_object(folder / "config.json")
        if not config:
            raise ValueError(f"{folder} has no config.json")
        nested = config.get("text_config")
        text_config = nested if isinstance(nested, dict) else config
        return cls(
            name=name or folder.name,
            vocab_size=_positive(text_config, "vocab_size"),
            max_model_len=_positive(text_config, "max_position_embeddings"),
        )


def _positive(config: Mapping[str, object], key: str) -> int | None:
    value = config.get(key)
    return value if isinstance(value, int) and value > 0 else None
