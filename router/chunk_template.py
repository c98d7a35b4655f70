"""The chunks of a stream that differ in nothing but their text."""

from json.encoder import encode_basestring

# Private-use characters: no answer's other fields have them.
_MARK = "\ue000"
_ID_MARK = "\ue001"
# A time that no answer is made at.
_TIME_MARK = 0x7FFF_FFFF_FFFF


class ChunkTemplate:
    """JSON whose one text is put in, instead of built and checked again for every token."""

    __slots__ = ("_after", "_before")

    MARK = _MARK
    ID_MARK = _ID_MARK
    TIME_MARK = _TIME_MARK

    def __init__(self, body: str) -> None:
        """`body`: the chunk's JSON with `MARK` as its text."""
        self._before, self._after = body.split(encode_basestring(_MARK))

    @staticmethod
    def signed(body: str, request_id: str, created_unix_s: int) -> str:
        """The JSON with its marks of an id and a time replaced."""
        return body.replace(str(_TIME_MARK), str(created_unix_s)).replace(_ID_MARK, request_id)

    def with_text(self, text: str) -> str:
        return f"{self._before}{encode_basestring(text)}{self._after}"
