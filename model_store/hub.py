"""Models named by a hub id, such as `Qwen/Qwen3-0.6B`."""

import re
from pathlib import Path

import httpx

from model_store.errors import HubUnavailable, PackageNotInstalled

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

FILES = ["*.json", "*.safetensors", "*.jinja"]
# Other formats of the same weights live in folders of their own or under these names.
LEFT_OUT = ["*/*", "consolidated*.safetensors"]


def is_hub_id(model: str) -> bool:
    """Whether `model` has the form of a hub id, owner/name."""
    return HUB_ID.fullmatch(model) is not None


def download(hub_id: str) -> Path:
    """Fetches what is not in the hub's own cache yet: weights, configuration and tokenizer, no code.

    Raises:
        HubUnavailable: no such model, no access to it, or no connection and nothing in the cache.
        PackageNotInstalled: huggingface-hub is missing.
    """
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError
    except ImportError as error:
        raise PackageNotInstalled(
            f"{hub_id} comes from the hub: `pip install 'huggingface-hub>=1,<2'`."
        ) from error
    try:
        return Path(snapshot_download(hub_id, allow_patterns=FILES, ignore_patterns=LEFT_OUT))
    except GatedRepoError as error:
        raise HubUnavailable(
            f"The hub gives {hub_id} only to accounts that were granted access: log in with `hf auth login`."
        ) from error
    except RepositoryNotFoundError as error:
        raise HubUnavailable(f"There is no folder {hub_id}, and the hub has no such model.") from error
    except LocalEntryNotFoundError as error:
        raise HubUnavailable(
            f"There is no folder {hub_id}, and the hub cannot be reached to fetch a model of that name."
        ) from error
    except (OSError, httpx.HTTPError) as error:
        raise HubUnavailable(f"{hub_id} could not be fetched from the hub: {error}") from error
