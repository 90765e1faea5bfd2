"""Attacks by a checkpoint whose archive is forged, of a session whose programs are root inside. A guest writes the
bytes of its archive, so it can have any content. Restored, it harms at most its own sandbox.
"""

import asyncio
import contextlib
import copy
import hashlib
import io
import json
import os
import stat
import tarfile
import tempfile
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from docker import APIClient

from tests.support.sandboxd.attack_sandboxd import HostileSession, OwnSandboxd, open_own_sandboxd
from tests.support.sandboxd.containers import IMAGE
from toolcrew.archives.folder import FolderStore
from toolcrew.contract.errors import SandboxUnavailable, ToolFailure
from toolcrew.contract.session_spec import SessionSpec
from toolcrew.workers.sandbox_client import SandboxClient
from toolcrew.workers.sandboxd.archives.root_changes import ArchiveHead
from toolcrew.workers.sandboxd.disks.changes import MAX_LIST_BYTES

pytestmark = pytest.mark.stack

DISK_BYTES = 64 * 1024 * 1024
TIB = 1024**4
CLASSES = {"default": {"user": "root", "workspace_bytes": DISK_BYTES}, "plain": {}}


@pytest.fixture(scope="module")
def store() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="toolcrew-store-") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def rooted(engine: APIClient, store: Path) -> Iterator[OwnSandboxd]:
    settings = {
        "TOOLCREW_TENANT_CLASSES": json.dumps(CLASSES),
        "TOOLCREW_SANDBOX_START": "oci",
        "TOOLCREW_WORKSPACE_STORE": str(store),
    }
    with open_own_sandboxd(engine, settings) as opened:
        yield opened


@pytest.fixture
def image(engine: APIClient) -> str:
    return str(engine.inspect_image(IMAGE)["Id"])


@pytest.fixture
def canary(tmp_path: Path) -> Iterator[Path]:
    """A file of the host, which must stay as it is."""
    (tmp_path / "canary").write_text("untouched")
    yield tmp_path / "canary"
    assert (tmp_path / "canary").read_text() == "untouched"
    assert os.listdir(tmp_path) == ["canary"]


def member(name: str, kind: bytes = tarfile.REGTYPE, content: bytes = b"evil\n", **fields: object) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, len(content) if kind == tarfile.REGTYPE else 0
    for field, value in fields.items():
        setattr(info, field, value)
    return info


def pack(*members: tarfile.TarInfo) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for info in members:
            archive.addfile(info, io.BytesIO(b"evil\n".ljust(info.size, b"\0")))
    return file.getvalue()


def build_archive(image: str, packed: bytes, replaced: bytes = b"", removed: bytes = b"") -> bytes:
    head = ArchiveHead(image, len(replaced), len(removed))
    return head.encode() + replaced + bytes(head.padding) + packed + removed


def store_archive(store: Path, archive: bytes) -> str:
    """Store a forged archive, as its tenant's guest could."""

    async def chunks() -> AsyncIterator[bytes]:
        yield archive

    name = hashlib.sha256(archive).hexdigest()[:20]
    asyncio.run(FolderStore(store).put(f"acme/{name}", chunks()))
    return name


def restore(rooted: OwnSandboxd, checkpoint: str) -> HostileSession | None:
    """Open a session from a checkpoint. Returns None when it is refused; then nothing is left of it."""
    client = SandboxClient(rooted.path)
    before = len(client.sessions())
    try:
        name = client.open("acme", checkpoint, SessionSpec(restore=checkpoint))
    except (ToolFailure, SandboxUnavailable):
        assert (len(client.sessions()), client.status()["sandboxes"]) == (before, before)
        client.disconnect()
        return None
    return HostileSession(rooted.path, client, rooted.api, name)


def assert_harmless(session: HostileSession) -> None:
    """Check what holds for every sandbox: its programs, its files, and its mounts."""
    assert session.is_usable()
    own = range(session.watched.host_id(0), session.watched.host_id(0) + 65_536)
    for folder, _, files in os.walk(session.watched.root / "usr/local"):
        for name in (".", *files):
            status = os.lstat(Path(folder, name))
            assert status.st_uid in own
            assert stat.S_IFMT(status.st_mode) not in (stat.S_IFBLK, stat.S_IFCHR)
    for line in session.watched.mounts().splitlines():
        fields = line.split(" ")
        if fields[4] in ("/", "/workspace", "/opt/toolcrew", "/output"):
            assert {"nosuid", "nodev"} <= set(fields[5].split(",")), line


LINK, HARD, BLOCK, CHAR = tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.BLKTYPE, tarfile.CHRTYPE
ARCHIVES = {
    "names with dots": [member("../../../../../../../../canary"), member("./usr/../../../../canary")],
    "absolute names": [member("/canary"), member("//etc/passwd")],
    "a link and a name below it": [
        member("./usr/local/out", LINK, linkname="/proc/1/root"),
        member("./usr/local/out/x"),
    ],
    "a link out and a name below it": [member("./out", LINK, linkname="../../../.."), member("./out/canary")],
    "a hard link out": [member("./usr/local/hard", HARD, linkname="../../../../../../../../canary")],
    "the disk of the host": [member("./usr/local/disk", BLOCK, devmajor=254, devminor=0, mode=0o666)],
    "the memory of the host": [member("./usr/local/mem", CHAR, devmajor=1, devminor=1, mode=0o666)],
    "forged whiteout": [member("./etc/passwd", CHAR, devmajor=0, devminor=0)],
    "guest files": [member("./opt/toolcrew/bin/bash"), member("opt/toolcrew/mine")],
    "PID 1": [member("./proc/1/mem"), member("./proc/sys/kernel/core_pattern")],
    "control groups": [member("./sys/fs/cgroup/memory/release_agent")],
    "a setuid program": [member("./usr/local/bin/sh2", mode=0o6755, uid=0, gid=0)],
    "host uid as owner": [member("./usr/local/hosts", uid=2_000_000, gid=2_000_000)],
    "path over a mount": [
        member("./opt/toolcrew", LINK, linkname="/tmp"),
        member("./workspace", LINK, linkname="/"),
    ],
    "file larger than any disk": [member("./usr/local/large", size=2 * DISK_BYTES)],
}
LISTS = {
    "guest files": b"./opt/toolcrew\0/opt/toolcrew\0./opt\0",
    "mounts": b"./proc\0./sys\0./dev\0./workspace\0./output\0/\0.\0",
    "names with dots": b"../../../..\0./../canary\0" + b"../" * 1000 + b"canary\0",
    "options": b"--no-preserve-root\0-rf\0--\0/\0",
    "whole root": b"./usr\0./bin\0./lib\0./etc\0",
    "missing end": b"./usr/bin/env" * 3000,
    "many names": b"./x\0" * 1_000_000,
}


@pytest.mark.parametrize("attack", ARCHIVES)
def test_a_forged_checkpoint_archive_cannot_place_files_outside_the_sandbox(
    rooted: OwnSandboxd, store: Path, image: str, canary: Path, attack: str
) -> None:
    """Aim: a file of the host, a device, a program of the guest, or an owner outside."""
    for info in (members := copy.deepcopy(ARCHIVES[attack])):
        info.name, info.linkname = (text.replace("canary", str(canary)[1:]) for text in (info.name, info.linkname))
    session = restore(rooted, store_archive(store, build_archive(image, pack(*members))))
    if session is not None:
        assert_harmless(session)
        session.close()
    assert_next_session_usable(rooted)


@pytest.mark.parametrize("attack", LISTS)
@pytest.mark.parametrize("when", ["replaced", "removed"])
def test_a_forged_checkpoint_cannot_delete_files_outside_its_own_layer(
    rooted: OwnSandboxd, store: Path, image: str, canary: Path, attack: str, when: str
) -> None:
    """Aim: files of the host, of the image for others, or of the guest."""
    lists = {"replaced": b"", "removed": b"", when: LISTS[attack].replace(b"canary", os.fsencode(canary)[1:])}
    session = restore(rooted, store_archive(store, build_archive(image, pack(member("./etc/mine")), **lists)))
    if session is not None:
        session.close()
    assert_next_session_usable(rooted)


def sparse(size: int) -> bytes:
    """Return an archive with a file that is a hole of `size` bytes."""
    info = member("./usr/local/sparse", tarfile.GNUTYPE_SPARSE)
    block = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    # The place of the real size in a header of GNU tar, in base 256.
    block[483:495] = b"\x80" + size.to_bytes(11, "big")
    block[148:156] = b" " * 8
    block[148:156] = f"{sum(block):06o}\0 ".encode()
    return bytes(block) + bytes(1024)


@pytest.mark.parametrize("size", [100 * TIB, 2**63 - 1, 2**80])
def test_a_giant_sparse_file_in_a_checkpoint_uses_no_host_memory(
    rooted: OwnSandboxd, store: Path, image: str, canary: Path, size: int
) -> None:
    """Aim: the disk or the memory of the host."""
    rooted.reset_peak()
    before = rooted.peak_bytes()
    session = restore(rooted, store_archive(store, build_archive(image, sparse(size))))
    if session is not None:
        assert_harmless(session)
        session.close()
    assert rooted.peak_bytes() - before < 64 * 1024 * 1024
    assert_next_session_usable(rooted)


def head(content: bytes, size: int | None = None) -> bytes:
    info = member(".toolcrew-root-changes")
    info.size = len(content) if size is None else size
    return info.tobuf(tarfile.USTAR_FORMAT if info.size < 8**11 else tarfile.GNU_FORMAT) + content.ljust(1024, b"\0")


@pytest.mark.parametrize(
    "archive",
    [
        head(b"", 8 * 1024**3),
        head(b"", 2**62),
        head(b"x" * 500),
        head(b"sha256:" + b"0" * 64 + b" 999999999\nabc"),
        head(b"sha256:" + b"0" * 64 + b" -1\nabc"),
        head(b"{image} 5 0\nabc"),
        head(b"{image} 0 0\n", 100_000),
        head(b"{image} 0 9999999\n", 82),
        head(b"- 0 9999999\n", 12),
        head(b"")[:700],
        b"",
    ],
    ids=range(11),
)
def test_a_malformed_checkpoint_list_uses_no_sandboxd_memory(
    rooted: OwnSandboxd, store: Path, image: str, canary: Path, archive: bytes
) -> None:
    """Aim: memory of sandboxd, or a checkpoint that counts as restored and is not."""
    rooted.reset_peak()
    before = rooted.peak_bytes()
    session = restore(rooted, store_archive(store, archive.replace(b"{image}", image.encode())))
    if session is not None:
        assert_harmless(session)
        session.close()
    assert rooted.peak_bytes() - before < 64 * 1024 * 1024
    assert_next_session_usable(rooted)


@pytest.mark.parametrize("is_root", [True, False], ids=["root", "no root"])
def test_lists_of_many_checkpoints_use_no_sandboxd_memory(
    rooted: OwnSandboxd, store: Path, image: str, is_root: bool
) -> None:
    """Aim: the memory of sandboxd, by lists of names in many checkpoints that are restored at once."""
    name = b"./etc/%s\0" % (b"x" * 240)
    names = name * (MAX_LIST_BYTES // len(name))
    archive = build_archive(image if is_root else f"sha256:{'0' * 64}", pack(member("./etc/mine")), names)
    checkpoint = store_archive(store, archive)
    rooted.reset_peak()
    before = rooted.peak_bytes()

    def open_one(number: int) -> None:
        with SandboxClient(rooted.path) as client, contextlib.suppress(ToolFailure, SandboxUnavailable):
            client.close(client.open("acme", f"many{number}", SessionSpec(restore=checkpoint)))

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(open_one, range(3)))
    assert rooted.peak_bytes() - before < 48 * 1024 * 1024
    assert_next_session_usable(rooted)


def test_a_list_in_the_stream_of_tar_is_only_a_file(rooted: OwnSandboxd, store: Path, image: str) -> None:
    """Aim: write a head into the stream of `tar`, which the same user runs, so that a later restore reads it."""
    head_of_image = member("./.toolcrew-root-changes", content=f"{image} 8 0\n./etc/x\0".encode())
    session = restore(rooted, store_archive(store, build_archive(image, pack(head_of_image))))
    assert session is not None
    assert session.bash("ls /etc/passwd /.toolcrew-root-changes").streams["merged"].startswith(b"/.toolcrew")
    assert_harmless(session)
    session.close()
    assert_next_session_usable(rooted)


def test_a_session_cannot_replace_the_programs_that_pack_its_files(rooted: OwnSandboxd) -> None:
    """Aim: pack other files than those of the session, with a `tar` of the session."""
    script = "for folder in /usr/local/bin /usr/bin /bin; do printf '#!/bin/sh\\nexit 0\\n' > $folder/tar; done; chmod 755 /usr/local/bin/tar"
    write = "echo > /opt/toolcrew/bin/tar || rm /opt/toolcrew/bin/tar || mv /opt/toolcrew /opt/other"
    with rooted.session(session="packer") as packer, SandboxClient(rooted.path) as client:
        assert packer.bash(f"{script}; echo kept > f").done["exit_code"] == 0
        assert packer.bash(write).done["exit_code"] != 0
        session = restore(rooted, str(client.checkpoint(packer.name)["checkpoint"]))
    assert session is not None
    assert session.bash("cat f").streams["merged"] == b"kept\n"
    session.close()


def assert_next_session_usable(rooted: OwnSandboxd) -> None:
    """Check that another session of the same image is as if nothing had happened."""
    with rooted.session(tenant="other", session="next") as session:
        assert session.is_usable()
        look = (
            "head -c 4 /etc/passwd; ls /usr/local/bin; ls -A /workspace; ls /usr/bin/env /etc/mine /canary 2>/dev/null"
        )
        assert session.bash(look).streams["merged"] == b"root/usr/bin/env\n"
