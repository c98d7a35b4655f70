"""How gRPC connections between our processes are made: in plain, or with TLS on both sides."""

from collections.abc import Sequence
from typing import Protocol

import grpc

from security.certificate_files import CertificateFiles
from security.tls_config import TlsConfig

ChannelOptions = Sequence[tuple[str, int | str]]


class CannotListen(OSError):
    """The port is taken, or the address is not this machine's."""


def listen(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None) -> int:
    """Adds a port to a server, before its start; None: a plain one. Returns the port's number.

    Raises:
        CannotListen: see there.
    """
    try:
        if credentials is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise CannotListen(f"gRPC cannot listen on {address}: {error}") from error


class ChannelSecurity(Protocol):
    """One for every connection of a process."""

    def connect(self, address: str, options: ChannelOptions) -> grpc.aio.Channel:
        """A channel to a worker at host:port; nothing is sent yet."""
        ...

    def listen(self, server: grpc.aio.Server, address: str) -> int:
        """As the function of that name."""
        ...


class Plaintext:
    """Neither encrypts nor asks who is there."""

    def connect(self, address: str, options: ChannelOptions) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(address, options, compression=grpc.Compression.NoCompression)

    def listen(self, server: grpc.aio.Server, address: str) -> int:
        return listen(server, address, None)


class MutualTls:
    """TLS; whoever connects shows a certificate of the same CA, or gets no connection."""

    def __init__(self, files: CertificateFiles, worker_name: str | None) -> None:
        self._client = grpc.ssl_channel_credentials(files.ca, files.key, files.cert)
        self._server = grpc.ssl_server_credentials(
            [(files.key, files.cert)], root_certificates=files.ca, require_client_auth=True
        )
        self._options: ChannelOptions = (
            () if worker_name is None else (("grpc.ssl_target_name_override", worker_name),)
        )

    def connect(self, address: str, options: ChannelOptions) -> grpc.aio.Channel:
        return grpc.aio.secure_channel(
            address, self._client, (*options, *self._options), compression=grpc.Compression.NoCompression
        )

    def listen(self, server: grpc.aio.Server, address: str) -> int:
        return listen(server, address, self._server)


def channel_security(config: TlsConfig | None) -> ChannelSecurity:
    """
    Raises:
        CertificateError: a file of the configuration cannot be used.
    """
    if config is None:
        return Plaintext()
    return MutualTls(CertificateFiles.read(config), config.worker_name)
