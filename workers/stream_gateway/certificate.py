"""The certificate of a gateway: made at its start, and never written to a disk."""

import datetime
import hashlib
import os
import ssl
from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_LIFE = datetime.timedelta(days=3650)
_MARGIN = datetime.timedelta(days=1)


@dataclass(frozen=True)
class GatewayCertificate:
    """A TLS context with a new key and a certificate of its own. `digest`: SHA-256 of the certificate in hex, which is
    all that clients check.
    """

    context: ssl.SSLContext
    digest: str


def make_certificate() -> GatewayCertificate:
    """Make a key, a certificate and a TLS 1.3 context."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "toolcrew stream gateway")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _MARGIN)
        .not_valid_after(now + _LIFE)
        .sign(key, hashes.SHA256())
    )
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ) + certificate.public_bytes(serialization.Encoding.PEM)
    digest = hashlib.sha256(certificate.public_bytes(serialization.Encoding.DER)).hexdigest()
    return GatewayCertificate(_build_context(pem), digest)


def _build_context(pem: bytes) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # Every connection proves itself anew, so no connection continues an earlier one.
    context.num_tickets = 0
    # The context can only read a file, and the file must never be on a disk.
    fd = os.memfd_create("certificate", os.MFD_CLOEXEC)
    try:
        os.write(fd, pem)
        context.load_cert_chain(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)
    return context
