#!/usr/bin/env python3
"""Write the TypeScript client of the HTTP API (clients/typescript/src/generated) from the API's OpenAPI document.

    .venv/bin/python scripts/typescript_client.py [--check]

With --check the script writes nothing there. It exits with status 1 if a file is out of date. It needs node >= 20.19 and
npm, and fetches the generator of clients/typescript/package-lock.json.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.pages.http_api import read_api  # noqa: E402

PACKAGE = ROOT / "clients" / "typescript"
GENERATED = PACKAGE / "src" / "generated"


def install() -> None:
    """Install the package's tools if they are not those of its lock file."""
    lock, stamp = (PACKAGE / "package-lock.json").read_bytes(), PACKAGE / "node_modules" / "package-lock.json"
    if not stamp.is_file() or stamp.read_bytes() != lock:
        subprocess.run(["npm", "ci", "--no-audit", "--no-fund", "--loglevel=error"], cwd=PACKAGE, check=True)
        stamp.write_bytes(lock)


def run_tool(name: str, *arguments: str, **variables: str) -> None:
    """Run an installed tool in the package's folder. Raises CalledProcessError with its output."""
    command = [str(PACKAGE / "node_modules" / ".bin" / name), *arguments]
    subprocess.run(command, cwd=PACKAGE, env={**os.environ, **variables}, check=True, stdout=sys.stderr)


def generate(folder: Path) -> None:
    """Write the generated files into a folder."""
    with tempfile.TemporaryDirectory() as place:
        document = Path(place) / "openapi.json"
        document.write_text(json.dumps(read_api()), encoding="utf-8")
        run_tool("openapi-ts", OPENAPI_DOCUMENT=str(document), GENERATED_FOLDER=str(folder))


def find_stale() -> list[str]:
    """Return the names of the generated files that are missing, too many, or have another content."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "generated"
        generate(folder)
        made, kept = _read(folder), _read(GENERATED)
        return sorted(name for name in made.keys() | kept.keys() if made.get(name) != kept.get(name))


def _read(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def main(arguments: list[str]) -> int:
    install()
    if "--check" not in arguments:
        shutil.rmtree(GENERATED, ignore_errors=True)
        generate(GENERATED)
        return 0
    stale = find_stale()
    for name in stale:
        print(f"{name} is out of date: run .venv/bin/python scripts/typescript_client.py", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
