#!/usr/bin/env python3
"""Fetch the npm packages of a list (sandbox-images/node/packages.json) into a folder, and check their integrity.

    scripts/fetch_npm.py LIST FOLDER

Only the standard library is used: images are built before anything is installed. The registry is the one that npm of
this machine uses, or `NPM_CONFIG_REGISTRY`, or registry.npmjs.org. Authority certificates: `SSL_CERT_FILE`.
"""

import base64
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

DEFAULT_REGISTRY = "https://registry.npmjs.org"
TIMEOUT_S = 60


def find_registry() -> str:
    """Return the address of the registry."""
    if registry := os.environ.get("NPM_CONFIG_REGISTRY"):
        return registry
    if shutil.which("npm") is None:
        return DEFAULT_REGISTRY
    answer = subprocess.run(["npm", "config", "get", "registry"], capture_output=True, text=True, check=True)
    return answer.stdout.strip() or DEFAULT_REGISTRY


def fetch(registry: str, name: str, version: str, integrity: str) -> bytes:
    """Return the archive of a package. Raises OSError, and ValueError when its content is not the expected one."""
    address = f"{registry.rstrip('/')}/{name}/-/{name}-{version}.tgz"
    with urllib.request.urlopen(address, timeout=TIMEOUT_S) as answer:
        archive: bytes = answer.read()
    found = "sha512-" + base64.b64encode(hashlib.sha512(archive).digest()).decode("ascii")
    if found != integrity:
        raise ValueError(f"{address} has the integrity {found}, not {integrity}: check the registry")
    return archive


def main(packages: Path, folder: Path) -> None:
    """Fetch the packages for this machine's processor."""
    registry = find_registry()
    for package in json.loads(packages.read_text(encoding="utf-8")):
        if package.get("machine", platform.machine()) == platform.machine():
            name, version = package["name"], package["version"]
            print(f"fetching {name} {version}", flush=True)
            (folder / package["file"]).write_bytes(fetch(registry, name, version, package["integrity"]))


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), Path(sys.argv[2]))
    except (OSError, ValueError) as error:
        sys.exit(f"fetch_npm: {error}")
