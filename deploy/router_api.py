"""What a router says of the workers that it knows."""

import httpx

from deploy.client_access import ClientAccess
from router.cluster_view import WorkerStatus
from router.errors import ErrorCode

_TIMEOUT_S = 5.0


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
        self._url = f"{access.scheme}://{http_address}/workers"
        self._headers = access.authorization
        self._ssl = access.ssl_context()

    def workers(self) -> list[WorkerStatus]:
        """The workers that are listed, connected or not.

        Raises:
            RouterRefused: see there.
            RouterApiError: no answer, or not the one expected.
        """
        try:
            response = httpx.get(
                self._url, headers=self._headers, verify=self._ssl, timeout=_TIMEOUT_S, trust_env=False
            )
            if response.status_code == ErrorCode.UNAUTHENTICATED.http_status:
                raise RouterRefused("the router asks for another API key: --api-key, or BATON_API_KEY")
            response.raise_for_status()
            return [WorkerStatus(**entry) for entry in response.json()]
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            raise RouterApiError(f"{self._url}: {error!r}") from error
