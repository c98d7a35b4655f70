"""What Ray Serve says of the application, and the one path by which its pools are scaled."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import httpx

# What Serve calls us.
APPLICATION = "baton"
ROUTER = "router"

_TIMEOUT_S = 30.0


class ServeApiError(Exception):
    """The dashboard of the Ray cluster did not do what it was asked to."""


@dataclass(slots=True, frozen=True)
class DeploymentStatus:
    """How many replicas there should be, and how many are in which state."""

    target: int
    running: int
    starting: int
    stopping: int
    message: str
    failed: bool
    # Process ids of those that run, on their nodes.
    pids: tuple[int, ...]

    @property
    def settled(self) -> bool:
        return self.running == self.target and not self.starting and not self.stopping


@dataclass(slots=True, frozen=True)
class ApplicationStatus:
    """`status` is one of Serve's: DEPLOYING, RUNNING, UNHEALTHY, DEPLOY_FAILED, DELETING."""

    status: str
    message: str
    deployments: Mapping[str, DeploymentStatus]


class ServeApi:
    """Serve's REST interface, on the dashboard of the Ray cluster."""

    def __init__(self, dashboard_address: str, token: str | None) -> None:
        """dashboard_address: host:port."""
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._client = httpx.Client(
            base_url=f"http://{dashboard_address}", headers=headers, timeout=_TIMEOUT_S, trust_env=False
        )

    def status(self) -> ApplicationStatus | None:
        """None: the application is not there (yet).

        Raises:
            ServeApiError: the dashboard does not answer, or not with what it should.
        """
        applications = self._request("GET", "/api/serve/applications/")["applications"]
        return parse_application(applications.get(APPLICATION))

    def scale(self, deployment: str, replicas: int) -> None:
        """Sets the number of replicas that there should be; waits for nothing.

        Raises:
            ServeApiError: refused, with Serve's reason.
        """
        path = f"/api/v1/applications/{APPLICATION}/deployments/{deployment}/scale"
        self._request("POST", path, {"target_num_replicas": replicas})

    def _request(self, method: str, path: str, body: dict[str, int] | None = None) -> dict:
        try:
            response = self._client.request(method, path, json=body)
            response.raise_for_status()
            return response.json()
        except httpx.HTTPStatusError as error:
            raise ServeApiError(
                f"{path}: {error.response.status_code} {error.response.text[:500]}"
            ) from error
        except (httpx.HTTPError, ValueError) as error:
            raise ServeApiError(f"{self._client.base_url}: {error}") from error


def parse_application(details: dict | None) -> ApplicationStatus | None:
    """Of an entry in Serve's `applications`."""
    if details is None:
        return None
    deployments = {name: _parse_deployment(each) for name, each in details["deployments"].items()}
    return ApplicationStatus(status=details["status"], message=details["message"], deployments=deployments)


def _parse_deployment(details: dict) -> DeploymentStatus:
    states = Counter(replica["state"] for replica in details["replicas"])
    running, stopping = states.pop("RUNNING", 0), states.pop("STOPPING", 0)
    return DeploymentStatus(
        target=details["target_num_replicas"],
        running=running,
        starting=states.total(),
        stopping=stopping,
        message=details["message"],
        failed=details["status"] == "DEPLOY_FAILED",
        pids=tuple(each["pid"] for each in details["replicas"] if each["state"] == "RUNNING"),
    )
