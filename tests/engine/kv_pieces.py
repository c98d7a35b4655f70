"""The KV that one engine offers, for another."""

from engine.engine import Engine
from engine.kv_layout import KVLayout
from engine.request import SequenceId


class Wire:
    """Keeps the KV that an engine offers, as a hand-off would carry it."""

    def __init__(self) -> None:
        self.pieces: list[tuple[SequenceId, int, int, int, bytes]] = []

    def on_layer(self, sequence_id, layer, token_start, token_end, packed) -> None:
        self.pieces.append((sequence_id, layer, token_start, token_end, packed.cpu().numpy().tobytes()))

    def deliver(self, engine: Engine, layout: KVLayout | None = None) -> None:
        """`layout`: of what came, if it is not the engine's own."""
        wire = engine.wire(layout or engine.layout)
        for name, *piece in self.pieces:
            assert engine.import_kv(name, wire, *piece)
