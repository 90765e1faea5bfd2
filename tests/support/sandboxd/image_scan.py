"""Find files of an image that could give extra rights to programs of the image."""

import subprocess
import tarfile
from typing import IO

SCAN_S = 120.0
# Every user may write files here, but no user may change the files of another user.
SHARED = ("tmp", "var/tmp", "run/lock")


def scan_image(image: str) -> list[str]:
    """Return faults as `<kind>: <path>`. A fault is a program with extra rights, by mode or by capability, or a path
    that every user can write.
    """
    made = subprocess.run(
        ["docker", "create", image, "x"], capture_output=True, text=True, check=True, timeout=SCAN_S
    ).stdout.strip()
    try:
        with subprocess.Popen(["docker", "export", made], stdout=subprocess.PIPE) as exporting:
            assert exporting.stdout is not None
            found = scan_files(exporting.stdout)
        assert exporting.returncode == 0, f"{image} was not exported whole"
        return found
    finally:
        subprocess.run(["docker", "rm", made], capture_output=True, check=True, timeout=SCAN_S)


def scan_files(archive: IO[bytes]) -> list[str]:
    """Return the faults of a tar archive. The archive is read to its end."""
    found, count = [], 0
    with tarfile.open(fileobj=archive, mode="r|") as files:
        for file in files:
            count += 1
            found += [f"{fault}: {file.name}" for fault in _judge(file)]
    while archive.read(1 << 16):
        pass
    assert count > 0, "an image without files was scanned"
    return found


def _judge(file: tarfile.TarInfo) -> list[str]:
    faults = []
    if (file.isfile() or file.isdir()) and file.mode & 0o6000:
        faults.append("setuid or setgid")
    if any(name.endswith("security.capability") for name in file.pax_headers):
        faults.append("capability")
    is_shared = file.isdir() and bool(file.mode & 0o1000) and file.name.strip("./") in SHARED
    if not file.issym() and file.mode & 0o002 and not is_shared and not file.isdev():
        faults.append("writable by everybody")
    return faults
