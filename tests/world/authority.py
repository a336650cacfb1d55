"""A certificate authority of the tests' own and one certificate for all the names of their world."""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID


def issue(directory: Path, names: Iterable[str]) -> tuple[Path, Path]:
    """Writes the authority's certificate, and a chain with its key for these names; their two paths."""
    directory.mkdir(parents=True, exist_ok=True)
    now = datetime.datetime.now(datetime.UTC)
    authority_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    authority_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "The tests' own authority")])

    def begin(subject: x509.Name, public: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder().subject_name(subject).issuer_name(authority_name).public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1)).not_valid_after(now + datetime.timedelta(days=30))
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), False)
        )  # fmt: skip

    usage = dict.fromkeys(
        ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only",
         "decipher_only"), False,
    )  # fmt: skip
    authority = (
        begin(authority_name, authority_key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), True)
        .add_extension(x509.KeyUsage(True, key_cert_sign=True, crl_sign=True, **_without(usage)), True)
        .sign(authority_key, hashes.SHA256())
    )
    certificate = (
        begin(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "origin")]), key.public_key())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name) for name in names]), False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False)
        .sign(authority_key, hashes.SHA256())
    )
    encoding = serialization.Encoding.PEM
    ca, chain = directory / "ca.pem", directory / "origin.pem"
    ca.write_bytes(authority.public_bytes(encoding))
    private = key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    chain.write_bytes(private + certificate.public_bytes(encoding))
    return ca, chain


def _without(usage: dict[str, bool]) -> dict[str, bool]:
    return {name: value for name, value in usage.items() if name != "digital_signature"}
