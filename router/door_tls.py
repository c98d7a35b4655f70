"""TLS of the two doors."""

import ssl
from dataclasses import dataclass

import grpc

from router.config import RouterConfig
from security.certificate_files import CertificateFiles, check_ca, read_pem


@dataclass(frozen=True, slots=True)
class DoorTls:
    """What each door listens with. None: in plain."""

    grpc: grpc.ServerCredentials | None
    http: ssl.SSLContext | None

    @classmethod
    def of(cls, config: RouterConfig) -> "DoorTls":
        """
        Raises:
            CertificateError: a file cannot be used.
        """
        if config.tls is None:
            return cls(None, None)
        files = CertificateFiles.read(config.tls)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(config.tls.cert, config.tls.key)
        context.set_alpn_protocols(["http/1.1"])
        client_ca = None
        if config.client_ca is not None:
            check_ca(config.client_ca)
            client_ca = read_pem(config.client_ca)
            context.load_verify_locations(config.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
        credentials = grpc.ssl_server_credentials(
            [(files.key, files.cert)],
            root_certificates=client_ca,
            require_client_auth=client_ca is not None,
        )
        return cls(credentials, context)
