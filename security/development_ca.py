"""A certificate authority for development and tests, and the certificates of a cluster.

Clients' certificates come from a CA of their own, so that none of them opens a worker.
"""

import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

CA_LIFE = timedelta(days=3650)
LIFE = timedelta(days=365)
# Clocks differ.
_BACKDATED = timedelta(hours=1)

LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
# In every worker's certificate: for `tls.worker_name`, where addresses are not known beforehand.
WORKER_NAME = "baton-worker"


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A certificate and its private key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    def write(self, folder: Path, name: str) -> None:
        """NAME.pem and NAME.key, readable by this user only."""
        _write(folder / f"{name}.pem", self.certificate.public_bytes(serialization.Encoding.PEM))
        key = self.key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        _write(folder / f"{name}.key", key)


def make_certificates(folder: Path, hosts: Sequence[str] = ()) -> None:
    """Writes into `folder` what a cluster needs; see docs/security.md for the names.

    CAs that are there already are kept, so that what they have issued stays good.

    Args:
        hosts: names and addresses of routers and workers, beside this machine's own.

    Raises:
        OSError: the folder cannot be written.
        ValueError: a CA that is there is damaged.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    every_host = tuple(dict.fromkeys((*LOCAL_HOSTS, *hosts)))
    ca = _read_or_make_ca(folder, "ca", "Baton development CA")
    issue(ca, "router", every_host).write(folder, "router")
    issue(ca, "worker", (*every_host, WORKER_NAME)).write(folder, "worker")
    clients = _read_or_make_ca(folder, "clients-ca", "Baton development CA of clients")
    issue(clients, "client", ()).write(folder, "client")


def issue(ca: KeyPair, name: str, hosts: Sequence[str]) -> KeyPair:
    """A certificate for server and client use, for these names and addresses."""
    key = ec.generate_private_key(ec.SECP256R1())
    usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca.key.public_key())
    builder = (
        _builder(name, key, ca.certificate.subject, LIFE)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(usage, critical=False)
        .add_extension(issuer, critical=False)
    )
    if hosts:
        names = x509.SubjectAlternativeName([_general_name(host) for host in hosts])
        builder = builder.add_extension(names, critical=False)
    return KeyPair(builder.sign(ca.key, hashes.SHA256()), key)


def make_ca(name: str) -> KeyPair:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = (
        _builder(name, key, subject, CA_LIFE)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
    )
    return KeyPair(builder.sign(key, hashes.SHA256()), key)


def _read_or_make_ca(folder: Path, file_name: str, name: str) -> KeyPair:
    certificate, key = folder / f"{file_name}.pem", folder / f"{file_name}.key"
    if certificate.exists() and key.exists():
        loaded = serialization.load_pem_private_key(key.read_bytes(), None)
        if not isinstance(loaded, ec.EllipticCurvePrivateKey):
            raise ValueError(f"{key} is not a key that this command has made")
        return KeyPair(x509.load_pem_x509_certificate(certificate.read_bytes()), loaded)
    ca = make_ca(name)
    ca.write(folder, file_name)
    return ca


def _builder(
    name: str, key: ec.EllipticCurvePrivateKey, issuer: x509.Name, life: timedelta
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(now + life)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _write(path: Path, content: bytes) -> None:
    """Never readable by others, not even while it is written."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.touch(mode=0o600)
    temporary.write_bytes(content)
    temporary.replace(path)
