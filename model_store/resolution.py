"""From what the user calls a model to the folder it is in."""

from pathlib import Path

from model_store import hub
from model_store.conversion_cache import ConversionCache
from model_store.embedded import EMBEDDED_MODELS
from model_store.errors import UnknownModel
from model_store.folder import check_folder
from model_store.gguf_file import conversion_name, is_gguf_path


def resolve(model: str) -> Path:
    """The local Hugging Face folder of `model`, checked, and made first if need be.

    `model` is an embedded model's name, a folder (which wins over a hub id of the same form), the path of a
    GGUF file, or a hub id. The first use of an embedded model or a file converts it (a minute for a small
    one) and that of a hub id downloads it; both show progress on stderr. Safe from many processes at once.
    Never loads torch into the asking process.

    Raises:
        ModelStoreError: with one message for the user; `model_store.errors` has the kinds.
    """
    folder = _locate(model)
    check_folder(folder)
    return folder


def _locate(model: str) -> Path:
    if embedded := EMBEDDED_MODELS.get(model):
        return ConversionCache.default().get(embedded.name, embedded.gguf_path())
    folder = Path(model).expanduser()
    if folder.is_dir() and model:
        return folder.resolve()
    if is_gguf_path(model):
        file = folder.resolve()
        return ConversionCache.default().get(conversion_name(file), file)
    if hub.is_hub_id(model):
        return hub.download(model)
    raise UnknownModel(
        f"There is no model {model!r}. Possible are: {', '.join(sorted(EMBEDDED_MODELS))} (embedded), "
        "the path of a Hugging Face folder (config.json, *.safetensors, tokenizer.json), "
        "the path of a GGUF file, or a hub id (owner/name)."
    )
