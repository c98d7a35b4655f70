"""How a client comes in at a router's doors: the key that it shows and the certificates it goes by."""

import ssl
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc

from deploy.cluster_state import ClusterState
from router.api_keys import first_plain_key
from security.certificate_files import CertificateError, check_ca, read_pem


class AccessError(Exception):
    """A file or an option that cannot be used. The message is for the user."""


@dataclass(frozen=True, slots=True)
class ClientAccess:
    """
    Attributes:
        api_key: None: none is shown.
        ca: that the router's certificate is of. None: the doors are in plain.
        cert, key: of the client, where the router asks for one.
    """

    api_key: str | None = field(default=None, repr=False)
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    def within(self, state: ClusterState) -> "ClientAccess":
        """With what is not given as the cluster's own configuration has it."""
        keys_file = state.api_keys_file
        return replace(
            self,
            api_key=self.api_key or (None if keys_file is None else first_plain_key(keys_file)),
            ca=self.ca or state.tls_ca,
        )

    @property
    def scheme(self) -> str:
        return "http" if self.ca is None else "https"

    @property
    def authorization(self) -> dict[str, str]:
        """As an HTTP header or gRPC metadata."""
        return {} if self.api_key is None else {"authorization": f"Bearer {self.api_key}"}

    def ssl_context(self) -> ssl.SSLContext | bool:
        """For httpx. True: where the scheme is http it does not matter.

        Raises:
            AccessError: a file cannot be used.
        """
        if self.ca is None:
            return True
        try:
            context = ssl.create_default_context(cafile=self.ca)
            if self.cert is not None:
                context.load_cert_chain(self.cert, self.key, password="")
        except (OSError, ValueError) as error:
            raise AccessError(f"{self.ca} or {self.cert} cannot be used: {error}") from error
        return context

    def channel(self, address: str) -> grpc.Channel:
        """Asks the door directly, whatever proxy the shell has set for the web.

        Raises:
            AccessError: a file cannot be used.
        """
        options = [("grpc.enable_http_proxy", 0)]
        if self.ca is None:
            return grpc.insecure_channel(address, options=options)
        try:
            check_ca(self.ca)
            credentials = grpc.ssl_channel_credentials(
                read_pem(self.ca),
                None if self.key is None else read_pem(self.key),
                None if self.cert is None else read_pem(self.cert),
            )
        except CertificateError as error:
            raise AccessError(str(error)) from error
        return grpc.secure_channel(address, credentials, options=options)
