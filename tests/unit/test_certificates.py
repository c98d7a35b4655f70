"""`baton certs`, and what is refused of a certificate."""

import ssl
import stat
from pathlib import Path

import pytest
from cryptography import x509
from typer.testing import CliRunner

from deploy.cli import app
from security.certificate_files import CertificateError, CertificateFiles
from security.channel_security import channel_security
from security.development_ca import make_certificates
from security.tls_config import TlsConfig


def tls(folder: Path, *, cert: str = "router.pem", key: str = "router.key", ca: str = "ca.pem") -> TlsConfig:
    return TlsConfig(cert=folder / cert, key=folder / key, ca=folder / ca)


def hosts(folder: Path, name: str) -> set[str]:
    certificate = x509.load_pem_x509_certificate((folder / f"{name}.pem").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return {str(each.value) for each in names}


def test_the_command_makes_what_a_cluster_needs_for_its_owner_only(tmp_path: Path) -> None:
    folder = tmp_path / "certificates"
    ran = CliRunner().invoke(app, ["certs", str(folder), "--host", "10.1.2.3", "--host", "gpu.example"])
    assert ran.exit_code == 0, ran.output
    names = ("ca", "clients-ca", "router", "worker", "client")
    files = {f"{name}.{kind}" for name in names for kind in ("pem", "key")}
    assert {path.name for path in folder.iterdir()} == files
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    everywhere = {"localhost", "127.0.0.1", "::1", "10.1.2.3", "gpu.example"}
    assert hosts(folder, "router") == everywhere
    assert hosts(folder, "worker") == everywhere | {"baton-worker"}


def test_a_ca_that_is_there_is_kept(tmp_path: Path) -> None:
    make_certificates(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    make_certificates(tmp_path, ["10.1.2.3"])
    kept = {path.name for path in tmp_path.iterdir() if before[path.name] == path.read_bytes()}
    assert kept == {"ca.pem", "ca.key", "clients-ca.pem", "clients-ca.key"}
    channel_security(tls(tmp_path))


def test_a_folder_that_cannot_be_written_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ran = CliRunner().invoke(app, ["certs", str(tmp_path / "file" / "below")])
    assert ran.exit_code == 1 and "Traceback" not in ran.output


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    make_certificates(folder)
    (folder / "empty.pem").touch()
    return folder


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"cert": "none.pem"}, "none.pem"),
        ({"key": "none.key"}, "none.key"),
        ({"ca": "none.pem"}, "none.pem"),
        ({"key": "worker.key"}, "worker.key"),
        ({"cert": "empty.pem"}, "empty.pem"),
        ({"ca": "empty.pem"}, "empty.pem"),
        ({"ca": "ca.key"}, "ca.key"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(certificates: Path, wrong: dict[str, str], named: str) -> None:
    with pytest.raises(CertificateError, match=named):
        CertificateFiles.read(tls(certificates, **wrong))


def test_a_private_key_is_never_shown(certificates: Path) -> None:
    files = CertificateFiles.read(tls(certificates))
    assert "PRIVATE" not in repr(files)


def test_clients_have_a_ca_of_their_own(certificates: Path) -> None:
    trusted = ssl.create_default_context(cafile=certificates / "clients-ca.pem").get_ca_certs()
    cluster = ssl.create_default_context(cafile=certificates / "ca.pem").get_ca_certs()
    assert {ca["serialNumber"] for ca in trusted}.isdisjoint(ca["serialNumber"] for ca in cluster)


def test_paths_do_not_depend_on_where_a_process_runs(
    certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(certificates)
    config = TlsConfig(cert=Path("router.pem"), key=Path("router.key"), ca=Path("ca.pem"))
    monkeypatch.chdir("/")
    CertificateFiles.read(config)
