"""Sources of the weights: the order of the sources, and the sha256 that overrides all of them. No real hub and no
real weights.
"""

import asyncio
import hashlib
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from toolcrew.contract.errors import ConfigError, ModelUnavailable
from toolcrew.orchestrator.models.local import LocalModelServer
from toolcrew.orchestrator.models.local_server import load_template
from toolcrew.orchestrator.models.weights import Weights, load_weights

CONTENT = bytes(range(256)) * 64
WEIGHTS = Weights(
    "tiny.gguf", len(CONTENT), hashlib.sha256(CONTENT).hexdigest(), "owner/repo", "toolcrew_test_chunk{number}", 3
)


@pytest.fixture
def chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install chunk packages whose code fails when it runs."""
    root = tmp_path / "packages"
    for number in range(1, 4):
        data = root / f"toolcrew_test_chunk{number}" / "data"
        data.mkdir(parents=True)
        (data.parent / "__init__.py").write_text("raise SystemExit('imported')")
        third = len(CONTENT) // 3 + 1
        (data / f"part{number:02d}.bin").write_bytes(CONTENT[(number - 1) * third : number * third])
    monkeypatch.syspath_prepend(str(root))
    return root


def find(tmp_path: Path, user_file: Path | None = None, hub_url: str | None = None) -> Path:
    return load_weights(WEIGHTS, user_file=user_file, cache_dir=tmp_path / "cache", hub_url=hub_url)


def put(path: Path, content: bytes = CONTENT) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def test_user_file_is_preferred_and_refused_with_a_wrong_hash(tmp_path: Path) -> None:
    put(tmp_path / "cache" / "tiny.gguf")
    assert find(tmp_path, put(tmp_path / "mine.gguf")) == tmp_path / "mine.gguf"
    with pytest.raises(ConfigError, match=WEIGHTS.sha256):
        find(tmp_path, put(tmp_path / "mine.gguf", CONTENT[::-1]))


def test_cached_weights_with_the_right_hash_are_used(tmp_path: Path) -> None:
    put(tmp_path / "cache" / "tiny.gguf")
    assert find(tmp_path, hub_url="http://127.0.0.1:9") == tmp_path / "cache" / "tiny.gguf"


def test_chunk_packages_are_joined_without_importing_them(tmp_path: Path, chunks: Path) -> None:
    assert find(tmp_path).read_bytes() == CONTENT
    assert not [name for name in sys.modules if name.startswith("toolcrew_test_chunk")]


@pytest.mark.parametrize("damage", [lambda part: part.write_bytes(b"x" * part.stat().st_size), Path.unlink])
def test_damaged_chunks_are_refused_and_leave_no_file(tmp_path: Path, chunks: Path, damage: object) -> None:
    damage(chunks / "toolcrew_test_chunk2" / "data" / "part02.bin")  # type: ignore[operator]
    with pytest.raises(ConfigError):
        find(tmp_path)
    assert not list((tmp_path / "cache").glob("*"))


@asynccontextmanager
async def hub(content: bytes) -> AsyncIterator[tuple[str, list[str]]]:
    """A hub that serves one file and supports byte ranges."""
    heads: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        heads.append(head)
        match = re.search(r"(?i)range: bytes=(\d+)-", head)
        part = content[int(match[1]) :] if match else content
        status = "206 Partial Content" if match else "200 OK"
        writer.write(f"HTTP/1.1 {status}\r\ncontent-length: {len(part)}\r\nconnection: close\r\n\r\n".encode() + part)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listener:
        yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}", heads


async def test_download_resumes_and_reports_progress(tmp_path: Path) -> None:
    put(tmp_path / "cache" / "tiny.gguf.part", CONTENT[:1000])
    progress: list[tuple[int, int]] = []
    async with hub(CONTENT) as (url, heads):
        await asyncio.to_thread(
            load_weights,
            WEIGHTS,
            cache_dir=tmp_path / "cache",
            hub_url=url,
            progress=lambda done_bytes, total: progress.append((done_bytes, total)),
        )
    assert "bytes=1000-" in heads[0]
    assert progress[-1] == (len(CONTENT), len(CONTENT))


async def test_download_with_a_wrong_hash_or_size_is_refused(tmp_path: Path) -> None:
    for content in (CONTENT[::-1], CONTENT * 2):
        async with hub(content) as (url, _):
            with pytest.raises(ConfigError):
                await asyncio.to_thread(find, tmp_path, None, url)
        assert content != CONTENT[::-1] or not list((tmp_path / "cache").glob("*.part"))


def test_chat_template_has_the_documented_hash() -> None:
    digest = hashlib.sha256(load_template().encode()).hexdigest()
    assert digest == "3693ad2307646660f137f08f5ba893b5f93d8934f0faf0e23c7535a43a827ffd"


@pytest.mark.parametrize(("start_timeout_s", "error"), [(60.0, "ended while loading"), (0.001, "did not load in")])
async def test_unloadable_weights_leave_no_server_process(tmp_path: Path, start_timeout_s: float, error: str) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"not a model")
    server = LocalModelServer(tmp_path / "bad.gguf", start_timeout_s=start_timeout_s)
    with pytest.raises(ModelUnavailable, match=error):
        await server.__aenter__()
    assert server.pid is None
