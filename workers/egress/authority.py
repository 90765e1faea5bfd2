"""The certificate authority of this proxy, which only sandboxes of this host trust. Its key lives in this process and
ends with it.
"""

import datetime
import os
import ssl
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

MAX_CONTEXTS = 1000
"""Maximum number of hosts with a kept certificate."""
RENEW_S = 86_400.0
"""Age in seconds at which a host gets a new certificate."""
_SKEW, _LIFE = datetime.timedelta(hours=1), datetime.timedelta(days=7)
_AUTHORITY_LIFE = datetime.timedelta(days=3650)


class Authority:
    """Issues certificates for hosts whose connections the proxy intercepts."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._host_key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "toolcrew egress proxy of this host")])
        self._certificate = (
            self._builder(name, name, self._key.public_key(), _AUTHORITY_LIFE)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_build_usage(is_authority=True), critical=True)
            .sign(self._key, SHA256())
        )
        self._contexts: OrderedDict[str, tuple[float, ssl.SSLContext]] = OrderedDict()

    def build_bundle(self) -> bytes:
        """Return the certificates that programs of a sandbox trust, in PEM: those of the system and this one."""
        paths = ssl.get_default_verify_paths()
        hashed = sorted(Path(paths.capath).glob("*.[0-9]")) if paths.capath else []
        system = [Path(paths.cafile)] if paths.cafile else hashed
        return b"".join([self._certificate.public_bytes(Encoding.PEM), *(path.read_bytes() for path in system)])

    def find_context(self, host: str) -> ssl.SSLContext:
        """Return the TLS context with which the proxy acts as `host`. A missing or old certificate is replaced by a new
        one.
        """
        created_at, context = self._contexts.get(host, (float("-inf"), None))
        if context is None or self._clock() - created_at > RENEW_S:
            context = self._build_context(host)
            self._contexts[host] = (self._clock(), context)
        self._contexts.move_to_end(host)
        if len(self._contexts) > MAX_CONTEXTS:
            self._contexts.popitem(last=False)
        return context

    def _build_context(self, host: str) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION
        context.set_alpn_protocols(["http/1.1"])
        # ssl reads certificates from files only.
        fd = os.memfd_create("certificate", os.MFD_CLOEXEC)
        try:
            os.write(fd, self._issue(host))
            context.load_cert_chain(f"/proc/self/fd/{fd}")
        finally:
            os.close(fd)
        return context

    def _issue(self, host: str) -> bytes:
        """Return the key and the certificate of a host, in PEM."""
        # A common name has at most 64 characters, so it is cut. Clients read only the alternative name.
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "intercepted host")])
        certificate = (
            self._builder(subject, self._certificate.subject, self._host_key.public_key(), _LIFE)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_build_usage(is_authority=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .sign(self._key, SHA256())
        )
        key = self._host_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        return key + certificate.public_bytes(Encoding.PEM)

    def _builder(
        self, subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, life: datetime.timedelta
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _SKEW)
            .not_valid_after(now + life)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
        )


def _build_usage(*, is_authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not is_authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        encipher_only=False,
        decipher_only=False,
    )
