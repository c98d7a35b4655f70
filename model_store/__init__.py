"""Model names to local Hugging Face folders."""

from model_store.errors import ModelStoreError
from model_store.resolution import resolve

__all__ = ["ModelStoreError", "resolve"]
