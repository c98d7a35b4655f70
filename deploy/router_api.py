"""What a router says of the workers that it knows."""

import httpx

from router.cluster_view import WorkerStatus

_TIMEOUT_S = 5.0


class RouterApiError(Exception):
    """The router does not answer, or not with what it should."""


class RouterApi:
    """The HTTP door's own pages."""

    def __init__(self, http_address: str) -> None:
        """http_address: host:port."""
        self._url = f"http://{http_address}/workers"

    def workers(self) -> list[WorkerStatus]:
        """The workers that are listed, connected or not.

        Raises:
            RouterApiError: no answer, or not the one expected.
        """
        try:
            response = httpx.get(self._url, timeout=_TIMEOUT_S, trust_env=False)
            response.raise_for_status()
            return [WorkerStatus(**entry) for entry in response.json()]
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            raise RouterApiError(f"{self._url}: {error!r}") from error
