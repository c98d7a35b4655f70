"""Certificates as they lie on disk, checked when they are read."""

import ssl
from dataclasses import dataclass, field
from pathlib import Path

from security.tls_config import TlsConfig


class CertificateError(OSError):
    """A file is missing, is no PEM, or does not fit the others. The message names it."""


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """PEM of an identity and of the CA that it trusts."""

    cert: bytes
    key: bytes = field(repr=False)
    ca: bytes

    @classmethod
    def read(cls, config: TlsConfig) -> "CertificateFiles":
        """
        Raises:
            CertificateError: see there.
        """
        files = cls(read_pem(config.cert), read_pem(config.key), read_pem(config.ca))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            # A password given at once: OpenSSL would ask for one on the terminal.
            context.load_cert_chain(config.cert, config.key, password="")
        except (ssl.SSLError, ValueError) as error:
            raise CertificateError(f"{config.cert} and {config.key} are no pair: {error}") from error
        check_ca(config.ca)
        return files


def check_ca(path: Path) -> None:
    """
    Raises:
        CertificateError: it holds no certificate.
    """
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except ssl.SSLError as error:
        raise CertificateError(f"{path} holds no certificate of a CA: {error}") from error
    except OSError as error:
        raise CertificateError(f"{path}: {error.strerror}") from error


def read_pem(path: Path) -> bytes:
    """
    Raises:
        CertificateError: it cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise CertificateError(f"{path}: {error.strerror}") from error
