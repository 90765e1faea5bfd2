"""Sessions that begin with an archive or a git bundle. The content is unpacked inside the sandbox. A hostile archive
gives one clear error and harms no other session.
"""

import bz2
import gzip
import io
import lzma
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.sandboxd.archives import build_tar
from tests.unit.orchestrator.sessions.test_workspace_files import git
from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.orchestrator.sdk.client import ToolClient
from toolcrew.orchestrator.sessions.session import Session

pytestmark = pytest.mark.stack

MIB = 1024 * 1024


def zip_of(*entries: tuple[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in entries:
            archive.writestr(name, content)
    return buffer.getvalue()


async def output(session: Session, command: str) -> str:
    result = await session.exec(["bash", "-c", command])
    assert result.returncode == 0, result.stderr
    return result.stdout.decode()


PLAIN = build_tar(("d/a.txt", b"x"), ("-n", b"y"), ("link", "d/a.txt"))


@pytest.mark.parametrize(
    "content", [PLAIN, gzip.compress(PLAIN), bz2.compress(PLAIN), lzma.compress(PLAIN)], ids=["tar", "gz", "bz2", "xz"]
)
async def test_a_tar_is_unpacked_with_every_compression(content: bytes, client: ToolClient, tmp_path: Path) -> None:
    (tmp_path / "it").write_bytes(content)
    async with await client.open_session(tmp_path / "it") as session:
        assert await output(session, "find . ! -name . | sort; cat link ./-n") == "./-n\n./d\n./d/a.txt\n./link\nxy"


async def test_a_zip_is_unpacked(client: ToolClient, tmp_path: Path) -> None:
    (tmp_path / "it").write_bytes(zip_of(("d/ä.txt", b"x"), ("-n", b"y")))
    async with await client.open_session(tmp_path / "it") as session:
        assert await output(session, "find . -type f | sort") == "./-n\n./d/ä.txt\n"


async def test_a_git_bundle_is_cloned_with_its_branches_and_without_a_remote(
    client: ToolClient, tmp_path: Path
) -> None:
    repository = tmp_path / "repository"
    repository.mkdir()
    git(repository, "init", "-q", "-b", "trunk")
    (repository / "a.txt").write_text("x")
    git(repository, "add", "a.txt")
    git(repository, "commit", "-q", "-m", "first")
    git(repository, "branch", "side")
    git(repository, "bundle", "create", str(tmp_path / "it"), "HEAD", "--branches")
    async with await client.open_session(tmp_path / "it") as session:
        text = await output(
            session,
            "git status -sb; git branch --format='%(refname)' | sort; git remote; git log --oneline | wc -l; cat a.txt",
        )
    assert text == "## trunk\nrefs/heads/side\nrefs/heads/trunk\n1\nx"


HOSTILE: dict[str, tuple[str, bytes, ErrorCode]] = {
    "parent path": ("tar", build_tar(("../../tmp/evil", b"x")), ErrorCode.PATH_NOT_ALLOWED),
    "absolute path": ("tar", build_tar(("/tmp/evil", b"x")), ErrorCode.PATH_NOT_ALLOWED),
    "through a link": ("tar", build_tar(("out", "/tmp"), ("out/evil", b"x")), ErrorCode.INVALID_ARGUMENTS),
    "zip with a parent path": ("zip", zip_of(("../../tmp/evil", b"x")), ErrorCode.PATH_NOT_ALLOWED),
    "zip with an absolute path": ("zip", zip_of(("/tmp/evil", b"x")), ErrorCode.PATH_NOT_ALLOWED),
    "truncated zip": ("zip", zip_of(("a", b"x" * 500))[:60], ErrorCode.INVALID_ARGUMENTS),
    "truncated gzip": ("tar.gz", gzip.compress(PLAIN)[:-20], ErrorCode.INVALID_ARGUMENTS),
    "not a tar": ("tar.xz", lzma.compress(b"no tar" * 1000), ErrorCode.INVALID_ARGUMENTS),
    "unknown format": ("bundle", b"# v2 git bundle\n" + b"0" * 40 + b" HEAD\n\nPACK", ErrorCode.INVALID_ARGUMENTS),
}


async def test_a_hostile_or_damaged_archive_is_refused_and_writes_nothing_outside(session: Session) -> None:
    found = {}
    for name, (kind, content, _) in HOSTILE.items():
        await output(session, f"mkdir '/workspace/{name}'")
        with pytest.raises(ToolFailure) as refused:
            await session._call_verb(
                "import", {"kind": kind, "path": f"/workspace/{name}"}, content=content, timeout_s=30
            )
        found[name] = refused.value.code
    assert found == {name: code for name, (_, _, code) in HOSTILE.items()}
    assert await output(session, "ls -A /tmp") == ""


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        ("tar.gz", lambda: gzip.compress(build_tar(*((f"f{number}", 25 * MIB) for number in range(4))), 1)),
        ("zip", lambda: zip_of(("big", bytes(100 * MIB)), ("after", b"x"))),
    ],
    ids=["tar.gz", "zip"],
)
async def test_a_decompression_bomb_ends_when_the_folder_is_full(
    kind: str, content: Callable[[], bytes], session: Session
) -> None:
    with pytest.raises(ToolFailure) as refused:
        # /output is the smallest writable folder of a sandbox.
        await session._call_verb("import", {"kind": kind, "path": "/output"}, content=content(), timeout_s=60)
    assert refused.value.code is ErrorCode.NO_SPACE
    assert await output(session, "rm -rf /output/*; echo still here") == "still here\n"
