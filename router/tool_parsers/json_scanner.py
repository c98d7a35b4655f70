"""A JSON object, followed a character at a time."""

import re
from enum import Enum, auto

_WHITESPACE = " \t\n\r"
_ESCAPES = '"\\/bfnrtu'
_HEX = frozenset("0123456789abcdefABCDEF")
_SCALAR_START = frozenset("-0123456789tfn")
_SCALAR_CHARS = frozenset("+-.0123456789abcdefghijklmnopqrstuvwxyzE")
_SCALAR = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?|true|false|null")
_CLOSERS = {"{": "}", "[": "]"}


class NotJson(ValueError):
    """The text cannot be the beginning of a JSON object."""


class _Expects(Enum):
    OBJECT = auto()
    FIRST_KEY = auto()
    KEY = auto()
    COLON = auto()
    FIRST_VALUE = auto()
    VALUE = auto()
    COMMA = auto()


class JsonScanner:
    """Says of every character whether it belongs to a member's value, and of which member.

    Strict, but for raw control characters in strings, as models write them in code: they are escaped.

    Attributes:
        key: the raw text of the outermost object's last key, quotes included.
        complete: the object has been closed.
    """

    def __init__(self) -> None:
        self.key = ""
        self.complete = False
        self._expects = _Expects.OBJECT
        self._open: list[str] = []
        self._scalar = ""
        self._in_string = False
        self._string_is_key = False
        # Characters left of the escape that the string is in; "u" has four more.
        self._escape_chars = 0

    def take(self, char: str) -> str:
        """The part of a member's value of the outermost object that `char` is; "" if it is of none.

        Raises:
            NotJson: `char` cannot stand here.
        """
        if self._in_string:
            return self._take_in_string(char)
        if self._scalar:
            if char in _SCALAR_CHARS:
                self._scalar += char
                return char
            self._end_scalar()
        if char in _WHITESPACE:
            return char if len(self._open) > 1 else ""
        return self._take_structure(char)

    def _take_in_string(self, char: str) -> str:
        in_key = self._string_is_key and len(self._open) == 1
        written = f"\\u{ord(char):04x}" if char < " " else char
        if in_key:
            self.key += written
        if self._escape_chars:
            self._take_escaped(char)
        elif char == "\\":
            self._escape_chars = 1
        elif char == '"':
            self._in_string = False
            self._expects = _Expects.COLON if self._string_is_key else _Expects.COMMA
        return "" if in_key else written

    def _take_escaped(self, char: str) -> None:
        first = self._escape_chars == 1
        if char not in (_ESCAPES if first else _HEX):
            raise NotJson(f"{char!r} in an escape")
        # 5 to 2 count the digits of \uXXXX down, so that 1 is always the character after the backslash.
        if first:
            self._escape_chars = 5 if char == "u" else 0
        else:
            self._escape_chars = self._escape_chars - 1 if self._escape_chars > 2 else 0

    def _end_scalar(self) -> None:
        if not _SCALAR.fullmatch(self._scalar):
            raise NotJson(f"{self._scalar!r} is no value")
        self._scalar = ""
        self._expects = _Expects.COMMA

    def _take_structure(self, char: str) -> str:
        depth = len(self._open)
        match self._expects, char:
            case _Expects.OBJECT, "{":
                self._enter(char)
            case ((_Expects.FIRST_KEY | _Expects.KEY), '"'):
                self._start_string(is_key=True)
            case _Expects.COLON, ":":
                self._expects = _Expects.VALUE
            case ((_Expects.FIRST_VALUE | _Expects.VALUE), _) if char in '{["' or char in _SCALAR_START:
                self._start_value(char)
                return char
            case ((_Expects.FIRST_KEY | _Expects.COMMA), "}"):
                self._leave(char)
            case ((_Expects.FIRST_VALUE | _Expects.COMMA), "]"):
                self._leave(char)
            case _Expects.COMMA, ",":
                self._expects = _Expects.KEY if self._open[-1] == "{" else _Expects.VALUE
            case _:
                raise NotJson(f"{char!r} where {self._expects.name} is expected")
        return char if depth > 1 else ""

    def _start_value(self, char: str) -> None:
        if char == '"':
            self._start_string(is_key=False)
        elif char in _CLOSERS:
            self._enter(char)
        else:
            self._scalar = char

    def _start_string(self, *, is_key: bool) -> None:
        self._in_string = True
        self._string_is_key = is_key
        if is_key and len(self._open) == 1:
            self.key = '"'

    def _enter(self, char: str) -> None:
        self._open.append(char)
        self._expects = _Expects.FIRST_KEY if char == "{" else _Expects.FIRST_VALUE

    def _leave(self, char: str) -> None:
        if _CLOSERS[self._open.pop()] != char:
            raise NotJson(f"{char!r} closes what it did not open")
        self._expects = _Expects.COMMA
        self.complete = not self._open
