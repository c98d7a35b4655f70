"""A call as models write it: {"name": ..., "arguments": {...}}."""

from collections.abc import Set

from pydantic_core import from_json

from router.tool_parsers.json_scanner import JsonScanner

_ARGUMENTS = ("arguments", "parameters")
# Members that some models add and nobody needs.
_IGNORED = ("type", "id")


class NotACall(ValueError):
    """The object is JSON, but no call of a declared function."""


class CallObject:
    """One call, read a character at a time.

    It is certain to be one, and `committed`, as soon as its name is known and its arguments begin; until
    then it can turn out to be some other object. Of a member that is there twice the first counts.

    Attributes:
        name: "" until it is known.
        arguments_done: all of the arguments have been returned.
        complete: the object has been closed.
    """

    def __init__(self, functions: Set[str]) -> None:
        self.name = ""
        self.committed = False
        self.arguments_done = False
        self._functions = functions
        self._scanner = JsonScanner()
        # The member whose value is being read, "" between values and in those that do not count.
        self._member = ""
        self._in_value = False
        self._value = ""
        # Arguments that came before the name.
        self._early_arguments = ""

    @property
    def complete(self) -> bool:
        return self._scanner.complete

    def take(self, char: str) -> str:
        """The part of the arguments' JSON text that became certain.

        Raises:
            NotJson: `char` cannot stand here.
            NotACall: this can be no call any more; never after it was `committed`.
        """
        part = self._scanner.take(char)
        certain = self._read(part) if part else self._end_value()
        if not self.complete or self.committed:
            return certain
        if not self.name:
            raise NotACall("no name")
        return self._commit_arguments("{}")

    def _read(self, part: str) -> str:
        if not self._in_value:
            self._start_value(part)
        if self._member in _ARGUMENTS and self.committed:
            return part
        if self._member:
            self._value += part
        return ""

    def _start_value(self, first: str) -> None:
        self._in_value, self._value = True, ""
        self._member = self._counted_member()
        if self._member == "name" and first != '"':
            raise NotACall("the name is no string")
        if self._member in _ARGUMENTS:
            if first not in '{"':
                raise NotACall("the arguments are no object")
            self.committed = bool(self.name) and first == "{"

    def _counted_member(self) -> str:
        """ "" for a member that does not count here."""
        if self.committed:
            return ""
        member = _decoded(self._scanner.key)
        if member == "name":
            return "" if self.name else member
        if member in _ARGUMENTS:
            return "" if self._early_arguments else member
        if member in _IGNORED:
            return ""
        raise NotACall(f"{member!r} is no member of a call")

    def _end_value(self) -> str:
        member, self._member, self._in_value = self._member, "", False
        if member == "name":
            return self._end_name()
        if member not in _ARGUMENTS:
            return ""
        if self.committed:
            self.arguments_done = True
            return ""
        arguments = self._value if self._value.startswith("{") else _unquoted_object(self._value)
        if self.name:
            return self._commit_arguments(arguments)
        self._early_arguments = arguments
        return ""

    def _end_name(self) -> str:
        name = _decoded(self._value)
        if name not in self._functions:
            raise NotACall(f"{name!r} is not declared")
        self.name = name
        return self._commit_arguments(self._early_arguments) if self._early_arguments else ""

    def _commit_arguments(self, arguments: str) -> str:
        self.committed = self.arguments_done = True
        return arguments


def _decoded(quoted: str) -> str:
    try:
        return str(from_json(quoted))
    except ValueError as error:  # a lone surrogate
        raise NotACall(str(error)) from error


def _unquoted_object(quoted: str) -> str:
    """The text of an object that was written into a string."""
    text = _decoded(quoted)
    try:
        value: object = from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise NotACall("the arguments are no object") from error
    if not isinstance(value, dict):
        raise NotACall("the arguments are no object")
    return text
