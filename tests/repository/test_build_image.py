"""The command that builds the images, and what it records of them."""

import base64
import hashlib
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tarfile
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.web.http_sites import serve_http

ROOT = Path(__file__).parents[2]


def load_digests() -> ModuleType:
    spec = importlib.util.spec_from_file_location("image_digests", ROOT / "scripts" / "image_digests.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


digests = load_digests()


def file_of(**fields: object) -> tarfile.TarInfo:
    member = tarfile.TarInfo("usr/bin/tool")
    for name, value in {"mode": 0o755, "mtime": 1, "size": 4, **fields}.items():
        setattr(member, name, value)
    return member


@pytest.mark.parametrize(
    "fields", [{"mode": 0o4755}, {"uid": 1000}, {"gid": 1000}, {"name": "usr/bin/other"}, {"type": tarfile.SYMTYPE}]
)
def test_metadata_and_content_changes_of_a_file_change_its_digest(fields: dict[str, object]) -> None:
    assert digests._describe_file(file_of(**fields), b"same") != digests._describe_file(file_of(), b"same")
    assert digests._describe_file(file_of(), b"more") != digests._describe_file(file_of(), b"same")


def test_only_installed_packages_are_listed_with_their_versions() -> None:
    status = (
        "Package: bash\nStatus: install ok installed\nArchitecture: amd64\nVersion: 5.2.15-2+b7\nDescription: shell\n "
        "Package: not this\n\n"
        "Package: removed\nStatus: deinstall ok config-files\nArchitecture: amd64\nVersion: 1\n\n"
    )
    assert list(digests._parse_packages(status)) == ["bash 5.2.15-2+b7 amd64"]


ENGINE = """#!/bin/sh
echo "$*" >>"$CALLS"
case "$*" in
    'pull '*) exit "$PULLS" ;;
    'buildx version' | 'image inspect toolcrew-sandbox:'*) exit 1 ;;
    'image inspect --format'*) echo 1000000 ;;
    'build '*) cat >/dev/null ;;
esac
"""


@pytest.mark.parametrize(
    ("options", "pulls", "has_pull"),
    [([], 0, False), (["--force"], 0, True), (["--force"], 1, True)],
    ids=["plain", "force", "no registry"],
)
def test_only_a_forced_build_pulls_the_base_image(
    tmp_path: Path, options: list[str], pulls: int, has_pull: bool
) -> None:
    engine, calls = tmp_path / "docker", tmp_path / "calls"
    engine.write_text(ENGINE)
    engine.chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "CALLS": str(calls),
        "PULLS": str(pulls),
        "TMPDIR": str(tmp_path),
    }
    command = [str(ROOT / "scripts" / "build-image"), *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)

    assert done.returncode == 0, done.stdout + done.stderr
    log = calls.read_text()
    assert ("pull --quiet debian:bookworm-slim" in log) == has_pull
    assert "BASE=debian:bookworm-slim" in log


class PackageRegistry(BaseHTTPRequestHandler):
    """A registry that answers every request with its path."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.path.encode())

    def log_message(self, format: str, *args: object) -> None: ...


def test_only_npm_packages_with_the_listed_integrity_are_used(tmp_path: Path) -> None:
    digest = base64.b64encode(hashlib.sha512(b"/tool/-/tool-1.2.3.tgz").digest()).decode()
    package = {"name": "tool", "version": "1.2.3", "file": "tool.tgz", "integrity": f"sha512-{digest}"}
    other = {**package, "file": "other.tgz", "machine": "another than " + platform.machine()}
    packages = tmp_path / "packages.json"
    with serve_http(PackageRegistry) as port:
        environment = {**os.environ, "NPM_CONFIG_REGISTRY": f"http://127.0.0.1:{port}"}

        def fetch(*listed: dict[str, str]) -> "subprocess.CompletedProcess[str]":
            packages.write_text(json.dumps(listed))
            command = [sys.executable, str(ROOT / "scripts" / "fetch_npm.py"), str(packages), str(tmp_path)]
            return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)

        refused = fetch({**package, "version": "1.2.4"})
        assert refused.returncode != 0
        assert "check the registry" in refused.stderr
        assert not (tmp_path / "tool.tgz").exists()
        assert fetch(package, other).returncode == 0
        assert [(tmp_path / name).exists() for name in ("tool.tgz", "other.tgz")] == [True, False]
