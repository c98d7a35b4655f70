"""What can be wrong with a model's name or its folder. The text of each is for the user, as it stands."""


class ModelStoreError(Exception):
    """A model cannot be had. Every error of this package is one."""


class UnknownModel(ModelStoreError):
    """The name is neither an embedded model, nor a folder, nor a hub id."""


class PackageNotInstalled(ModelStoreError):
    """The package that carries the model, or that fetches or converts it, is missing."""


class IncompleteFolder(ModelStoreError):
    """A model's folder lacks a file that is needed."""


class CorruptFile(ModelStoreError):
    """A file of a model's folder cannot be read as what its name says."""


class ConversionFailed(ModelStoreError):
    """A GGUF file could not be converted into a folder."""


class HubUnavailable(ModelStoreError):
    """The hub does not have the model, does not give it, or cannot be reached."""
