"""Print the digests of the sandbox images on this engine: one JSON object, image name -> the fields below.

python3 scripts/image_digests.py IMAGE... > digests.json

tag       hash of the inputs of the build; the same files of this project give the same tag id        id that the engine
assigns; it covers the times of the build, so no two builds have the same id content   SHA-256 over the path, kind,
mode, owner and bytes of every file and over the configuration, without times; equal for two builds from equal packages
packages  SHA-256 over the names and versions of the Debian packages, and the number of packages size      size in bytes
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

_DPKG_STATUS = "var/lib/dpkg/status"
_CONFIG = ("Env", "Entrypoint", "Cmd", "User", "WorkingDir", "Labels", "Volumes", "ExposedPorts")


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit("usage: python3 scripts/image_digests.py IMAGE...")
    facts = {image: describe(image) for image in sys.argv[1:]}
    print(json.dumps(facts, indent=2, sort_keys=True))


def describe(image: str) -> dict[str, Any]:
    """Return the fields of one image. Exits with the message of the engine if the image does not exist."""
    inspected = json.loads(_docker("image", "inspect", image))[0]
    config = {name: inspected["Config"].get(name) for name in _CONFIG}
    lines = [json.dumps(config, sort_keys=True)]
    packages = b""
    with _exported(image) as stream, tarfile.open(fileobj=stream, mode="r|") as archive:
        for member in archive:
            content = b""
            if member.isreg():
                file = archive.extractfile(member)
                content = file.read() if file else b""
            if member.name == _DPKG_STATUS:
                packages = content
            lines.append(_describe_file(member, content))
    versions = sorted(_parse_packages(packages.decode()))
    return {
        "tag": _find_tag(inspected["RepoTags"] or []),
        "id": inspected["Id"],
        "content": _digest(sorted(lines)),
        "packages": {"count": len(versions), "digest": _digest(versions)},
        "size": inspected["Size"],
    }


def _describe_file(member: tarfile.TarInfo, content: bytes) -> str:
    digest = hashlib.sha256(content).hexdigest() if member.isreg() else ""
    return f"{member.name!a} {member.type!a} {member.mode:o} {member.uid}:{member.gid} {member.linkname!a} {digest}"


def _parse_packages(status: str) -> Iterator[str]:
    """Yield `name version architecture` of each package that dpkg's status file lists as installed."""
    for paragraph in status.split("\n\n"):
        fields = dict(
            line.split(": ", 1) for line in paragraph.splitlines() if ": " in line and not line.startswith(" ")
        )
        if fields.get("Status", "").endswith(" installed"):
            yield f"{fields['Package']} {fields['Version']} {fields['Architecture']}"


def _find_tag(tags: list[str]) -> str:
    """Return the tag that is the hash of the inputs, and not a tag such as `latest` that moves."""
    return next((tag for tag in sorted(tags) if not tag.endswith(":dev")), "")


def _digest(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


@contextmanager
def _exported(image: str) -> Iterator[IO[bytes]]:
    """Yield the file tree of a container that is created for this purpose and never started."""
    container = _docker("create", "--network", "none", image).strip()
    try:
        with subprocess.Popen(["docker", "export", container], stdout=subprocess.PIPE) as export:
            assert export.stdout is not None
            yield export.stdout
            export.stdout.read()
        if export.returncode != 0:
            sys.exit(f"the engine did not export {image}")
    finally:
        _docker("rm", "-v", container)


def _docker(*arguments: str) -> str:
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(done.stderr.strip())
    return done.stdout


if __name__ == "__main__":
    main()
