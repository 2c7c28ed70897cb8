"""Certificates for tests: an authority, and what it has signed."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

PEM = serialization.Encoding.PEM


class Signed(NamedTuple):
    cert_file: Path
    key_file: Path


class Authority:
    """Signs certificates, and writes them and itself into a directory."""

    def __init__(self, directory: Path, name: str = "authority") -> None:
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        certificate = self._builder(self._name, self._key.public_key()).add_extension(
            x509.BasicConstraints(ca=True, path_length=0), critical=True
        )
        self._certificate = certificate.sign(self._key, hashes.SHA256())
        self.file = directory / f"{name}.pem"
        self.file.write_bytes(self._certificate.public_bytes(PEM))

    def sign(self, name: str, *, password: bytes | None = None) -> Signed:
        """A certificate for this machine."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = x509.SubjectAlternativeName([x509.DNSName("localhost"), x509.IPAddress(ip_address("127.0.0.1"))])
        certificate = self._builder(_name(name), key.public_key()).add_extension(names, critical=False)
        signed = Signed(self._directory / f"{name}.pem", self._directory / f"{name}.key")
        signed.cert_file.write_bytes(certificate.sign(self._key, hashes.SHA256()).public_bytes(PEM))
        secret: serialization.KeySerializationEncryption = serialization.NoEncryption()
        if password is not None:
            secret = serialization.BestAvailableEncryption(password)
        signed.key_file.write_bytes(key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, secret))
        return signed

    def trusted(self, own: Signed | None = None) -> ssl.SSLContext:
        """What a client needs to believe whoever shows a certificate of this authority; and its own, if it has one."""
        context = ssl.create_default_context(cafile=str(self.file))
        if own is not None:
            context.load_cert_chain(*own)
        return context

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(hours=1))
            .not_valid_after(now + timedelta(hours=1))
        )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])
