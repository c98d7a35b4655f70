"""What a router says of the workers that it knows, and of where requests go."""

from collections.abc import Mapping
from typing import TypeVar
from urllib.parse import quote

import httpx
from pydantic import TypeAdapter, ValidationError

from deploy.client_access import ClientAccess
from router.cluster_view import WorkerStatus
from router.errors import ErrorCode
from router.explanation import Explanation

_TIMEOUT_S = 5.0
_WORKERS = TypeAdapter(list[WorkerStatus])
_EXPLANATION = TypeAdapter(Explanation)
_EXPLANATIONS = TypeAdapter(list[Explanation])

T = TypeVar("T")


class RouterApiError(Exception):
    """The router does not answer, or not with what it should."""


class RouterRefused(Exception):
    """The router does not take this client's key. The message is for the user."""


class RouterApi:
    """The HTTP door's own pages."""

    def __init__(self, http_address: str, access: ClientAccess) -> None:
        """http_address: host:port.

        Raises:
            AccessError: a file of `access` cannot be used.
        """
        self._url = f"{access.scheme}://{http_address}"
        self._headers = access.authorization
        self._ssl = access.ssl_context()

    def workers(self) -> list[WorkerStatus]:
        """The workers that are listed, connected or not.

        Raises:
            RouterRefused: see there.
            RouterApiError: no answer, or not the one expected.
        """
        return _read(_WORKERS, self._ask("GET", "/workers"))

    def explain(self, body: Mapping[str, object]) -> Explanation:
        """Where a request with this body, of a completion or of a chat, would go now.

        Raises:
            RouterRefused: see there.
            RouterApiError: no answer, or the request is wrong.
        """
        return _read(_EXPLANATION, self._ask("POST", "/explain", body))

    def explain_past(self, request_id: str) -> list[Explanation]:
        """Where each attempt at a request went.

        Raises:
            RouterRefused: see there.
            RouterApiError: no answer, or nobody remembers the request.
        """
        return _read(_EXPLANATIONS, self._ask("GET", f"/explain/{quote(request_id, safe='')}"))

    def _ask(self, method: str, path: str, body: Mapping[str, object] | None = None) -> object:
        url = self._url + path
        try:
            response = httpx.request(
                method,
                url,
                json=body,
                headers=self._headers,
                verify=self._ssl,
                timeout=_TIMEOUT_S,
                trust_env=False,
            )
            if response.status_code == ErrorCode.UNAUTHENTICATED.http_status:
                raise RouterRefused("the router asks for another API key: --api-key, or BATON_API_KEY")
            if response.is_client_error:
                raise RouterApiError(response.json()["error"]["message"])
            return response.raise_for_status().json()
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            raise RouterApiError(f"{url}: {error!r}") from error


def _read(form: TypeAdapter[T], answer: object) -> T:
    try:
        return form.validate_python(answer)
    except ValidationError as error:
        raise RouterApiError(f"not what a router of this version says: {error}") from error
