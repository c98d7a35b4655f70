"""Whether a worker may hand KV to another: the same model, dtypes that are equal or may be converted, and
versions that meet."""

from collections.abc import Iterator
from dataclasses import dataclass

from engine.kv_conversion import convertible
from engine.kv_layout import CACHED_DTYPES, KVLayout, TensorLayout
from protos import kv_pb2

# Protocol N talks to N-1.
PROTOCOL_VERSION = 1
OLDEST_PROTOCOL_VERSION = 1


@dataclass(frozen=True, slots=True)
class Difference:
    """A field in which two workers differ."""

    field: str
    ours: object
    theirs: object

    def __str__(self) -> str:
        return f"{self.field}: {self.ours} here, {self.theirs} there"


class IncompatiblePeers(ValueError):
    """Names every field that differs, with both values."""

    def __init__(self, differences: tuple[Difference, ...]) -> None:
        super().__init__("; ".join(map(str, differences)))
        self.differences = differences


def check_compatible(ours: KVLayout, theirs: KVLayout, their_version: int, *, converts: bool = False) -> None:
    """
    Args:
        ours: of the receiver's cache.
        theirs: of what the sender hands off. Its block size may be another.
        converts: other dtypes may come.

    Raises:
        IncompatiblePeers: see there.
    """
    differences = (*_version_differences(their_version), *_layout_differences(ours, theirs, converts))
    if differences:
        raise IncompatiblePeers(differences)


def _version_differences(theirs: int) -> Iterator[Difference]:
    # A newer peer by one talks our version.
    if not OLDEST_PROTOCOL_VERSION <= theirs <= PROTOCOL_VERSION + 1:
        yield Difference("protocol_version", PROTOCOL_VERSION, theirs)


def _layout_differences(ours: KVLayout, theirs: KVLayout, converts: bool) -> Iterator[Difference]:
    if ours.model_fingerprint != theirs.model_fingerprint:
        yield Difference("model_fingerprint", ours.model_fingerprint, theirs.model_fingerprint)
    if ours.dtype != theirs.dtype and not (converts and _is_known(theirs)):
        yield Difference("dtype", ours.dtype, theirs.dtype)
    if len(ours.layers) != len(theirs.layers):
        yield Difference("number of layers", len(ours.layers), len(theirs.layers))
        return
    for layer, (our_tensors, their_tensors) in enumerate(zip(ours.layers, theirs.layers, strict=True)):
        same = convertible(our_tensors, their_tensors) if converts else our_tensors == their_tensors
        if not same:
            # The others differ in the same way, nearly always.
            yield Difference(f"layers[{layer}]", _describe(our_tensors), _describe(their_tensors))
            return


def _is_known(layout: KVLayout) -> bool:
    return all(tensor.dtype in CACHED_DTYPES for tensors in layout.layers for tensor in tensors)


def _describe(tensors: tuple[TensorLayout, ...]) -> str:
    return (
        ", ".join(f"{t.name}[{t.num_heads} heads of {t.head_dim} {t.dtype}]" for t in tensors) or "no tensors"
    )


def layout_to_proto(layout: KVLayout) -> kv_pb2.KvLayout:
    return kv_pb2.KvLayout(
        model_fingerprint=layout.model_fingerprint,
        dtype=layout.dtype,
        block_size=layout.block_size,
        layers=[
            kv_pb2.LayerLayout(
                tensors=[
                    kv_pb2.TensorLayout(
                        name=t.name, num_heads=t.num_heads, head_dim=t.head_dim, dtype=t.dtype
                    )
                    for t in tensors
                ]
            )
            for tensors in layout.layers
        ],
    )


def layout_from_proto(layout: kv_pb2.KvLayout) -> KVLayout:
    """The values as they came: a dtype that nobody knows stays one, for the comparison to name it."""
    return KVLayout(
        model_fingerprint=layout.model_fingerprint,
        dtype=layout.dtype,
        block_size=layout.block_size,
        layers=tuple(
            tuple(
                TensorLayout(t.name, t.num_heads, t.head_dim, t.dtype or layout.dtype) for t in layer.tensors
            )
            for layer in layout.layers
        ),
    )
