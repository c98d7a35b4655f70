"""Compiles protos/*.proto at build, for wheels and editable installs alike."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent


def compile_protos() -> None:
    """Writes the stubs beside their sources, with `-I` the repository root: they import as `protos.*`."""
    from grpc_tools import protoc

    sources = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "protos").glob("*.proto"))
    outputs = [f"--{kind}_out={ROOT}" for kind in ("python", "pyi", "grpc_python")]
    if protoc.main(["protoc", f"-I{ROOT}", *outputs, *sources]) != 0:
        raise SystemExit("protoc failed on " + ", ".join(sources))


class BuildPyWithProtos(build_py):
    def run(self) -> None:
        compile_protos()
        super().run()


setup(cmdclass={"build_py": BuildPyWithProtos})
