"""The scan of images finds files that grant privileges."""

import io
import tarfile

import pytest

from tests.support.sandboxd.image_scan import scan_files


def archive(name: str, mode: int, kind: bytes = tarfile.REGTYPE, **headers: str) -> io.BytesIO:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w", format=tarfile.PAX_FORMAT) as tar:
        file = tarfile.TarInfo(name)
        file.mode, file.type, file.pax_headers = mode, kind, headers
        tar.addfile(file)
    data.seek(0)
    return data


@pytest.mark.parametrize(
    ("name", "mode", "kind", "headers", "findings"),
    [
        ("bin/su", 0o4755, tarfile.REGTYPE, {}, ["setuid or setgid: bin/su"]),
        ("bin/wall", 0o2755, tarfile.REGTYPE, {}, ["setuid or setgid: bin/wall"]),
        ("bin/ping", 0o755, tarfile.REGTYPE, {"SCHILY.xattr.security.capability": "x"}, ["capability: bin/ping"]),
        ("etc/passwd", 0o666, tarfile.REGTYPE, {}, ["writable by everybody: etc/passwd"]),
        ("tmp", 0o777, tarfile.DIRTYPE, {}, ["writable by everybody: tmp"]),
        ("tmp", 0o1777, tarfile.DIRTYPE, {}, []),
        ("opt", 0o1777, tarfile.DIRTYPE, {}, ["writable by everybody: opt"]),
        ("bin/sh", 0o777, tarfile.SYMTYPE, {}, []),
        ("dev/null", 0o666, tarfile.CHRTYPE, {}, []),
        ("bin/ls", 0o755, tarfile.REGTYPE, {}, []),
    ],
)
def test_scan_reports_files_by_mode_and_capability(
    name: str, mode: int, kind: bytes, headers: dict[str, str], findings: list[str]
) -> None:
    assert scan_files(archive(name, mode, kind, **headers)) == findings


def test_scan_of_an_archive_without_files_fails() -> None:
    empty = io.BytesIO()
    tarfile.open(fileobj=empty, mode="w").close()
    empty.seek(0)
    with pytest.raises(AssertionError, match="without files"):
        scan_files(empty)
