"""A certificate for site.example and search.example that only the tests trust. The certificate is valid for a hundred
years.
"""

import ssl
import tempfile
from pathlib import Path

_KEY = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQguvs6qa41vZNj+jqn
YRZiI90NIMc0RzrTYBCAKg64hM+hRANCAASLPU+GW/mCwSYkzbHvO26f4IIhvAgJ
2w3iLUs3kw8xEWQS6iW12n/91YSk9S/F0o6hEkRIU7sLrlC+zxSI3k9Q
-----END PRIVATE KEY-----
"""
_CERTIFICATE = """\
-----BEGIN CERTIFICATE-----
MIIBrjCCAVSgAwIBAgIUGsY8OPpBo6sgCnPcuDp1swIPPDwwCgYIKoZIzj0EAwIw
FzEVMBMGA1UEAwwMc2l0ZS5leGFtcGxlMCAXDTI2MTEyMjA1MjUxOVoYDzIxMjYx
MDI5MDUyNTE5WjAXMRUwEwYDVQQDDAxzaXRlLmV4YW1wbGUwWTATBgcqhkjOPQIB
BggqhkjOPQMBBwNCAASLPU+GW/mCwSYkzbHvO26f4IIhvAgJ2w3iLUs3kw8xEWQS
6iW12n/91YSk9S/F0o6hEkRIU7sLrlC+zxSI3k9Qo3wwejAdBgNVHQ4EFgQUZ7fj
nONfVV6hwsvNMEE4l6rz5QQwHwYDVR0jBBgwFoAUZ7fjnONfVV6hwsvNMEE4l6rz
5QQwDwYDVR0TAQH/BAUwAwEB/zAnBgNVHREEIDAeggxzaXRlLmV4YW1wbGWCDnNl
YXJjaC5leGFtcGxlMAoGCCqGSM49BAMCA0gAMEUCIA+5WqKF8z94e1/cmQnc/CvW
NBJvGGeRQjm6K9grWrHlAiEAmmaa/Eeij7855/Mm3td8zmTcjiGxphlWPQvXNiEK
D/M=
-----END CERTIFICATE-----
"""


def server_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tempfile.NamedTemporaryFile("w") as file:
        file.write(_KEY + _CERTIFICATE)
        file.flush()
        context.load_cert_chain(file.name)
    return context


def trusting_context() -> ssl.SSLContext:
    """Return a client's context that trusts only this authority. Names are checked as usual."""
    return ssl.create_default_context(cadata=_CERTIFICATE)


def write_authority(path: Path) -> Path:
    """Write the authority to a file, for programs that read their authority from a file."""
    path.write_text(_CERTIFICATE)
    return path
