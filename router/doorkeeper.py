"""Who may come in at the doors: both ask here before they read a request."""

from collections.abc import Iterable

from router.api_keys import ANONYMOUS, ApiKey, KeyRing
from router.errors import ErrorCode, RequestError


class Doorkeeper:
    """Knows a client by the key in its `Authorization: Bearer`."""

    def __init__(self, keys: KeyRing | None) -> None:
        """keys: None lets everybody in."""
        self._keys = keys

    def admit(self, authorization: str | None) -> ApiKey:
        """
        Args:
            authorization: the header's value; None where there is none.

        Raises:
            RequestError: UNAUTHENTICATED.
        """
        if self._keys is None:
            return ANONYMOUS
        scheme, _, presented = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not presented.strip():
            raise _unauthenticated("an API key is needed: send it as Authorization: Bearer KEY")
        key = self._keys.find(presented.strip())
        if key is None:
            raise _unauthenticated("this API key is not valid here")
        return key


def authorization_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> str | None:
    """The `authorization` of a gRPC call's metadata."""
    for name, value in metadata or ():
        if name == "authorization" and isinstance(value, str):
            return value
    return None


def _unauthenticated(message: str) -> RequestError:
    return RequestError(ErrorCode.UNAUTHENTICATED, message)
