"""The chunks of a stream that differ in nothing but their text."""

import json

# A private-use character: no answer's other fields have it.
_MARK = "\ue000"
_encode = json.JSONEncoder(ensure_ascii=False).encode


class ChunkTemplate:
    """JSON whose one text is put in, instead of built and checked again for every token."""

    MARK = _MARK

    def __init__(self, body: str) -> None:
        """`body`: the chunk's JSON with `MARK` as its text."""
        self._before, self._after = body.split(_encode(_MARK))

    def with_text(self, text: str) -> str:
        return f"{self._before}{_encode(text)}{self._after}"
