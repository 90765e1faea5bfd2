"""Attacks on the skills that all sandboxes of a host mount: change the skills, find another tenant's skills, or place
other content under a digest.
"""

import io
import json
import tarfile
from collections.abc import Iterator, Mapping

import pytest
from docker import APIClient

from tests.support.sandboxd.attack_sandboxd import HostileSession, OwnSandboxd, open_own_sandboxd
from toolcrew.contract.errors import ErrorCode, SandboxUnavailable, ToolFailure
from toolcrew.contract.skills import BundleDigest
from toolcrew.workers.sandbox_client import SandboxClient

FILES = {
    "SKILL.md": b"---\nname: echo\n---\n",
    "data/word.txt": b"found",
    "scripts/run.sh": b"#!/bin/sh\ncat $SKILL_DIR/data/word.txt\n",
}


def digest_of(files: Mapping[str, bytes]) -> str:
    digest = BundleDigest()
    for path, data in sorted(files.items()):
        digest.add(path, data, is_executable=path.startswith("scripts/"))
    return digest.hexdigest()


def pack(files: Mapping[str, bytes], *odd: tarfile.TarInfo) -> io.BytesIO:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for entry in odd:
            archive.addfile(entry)
        for path, data in sorted(files.items()):
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode = len(data), 0o6755 if path.startswith("scripts/") else 0o666
            archive.addfile(entry, io.BytesIO(data))
    return packed


def place_skill(
    sandboxd: OwnSandboxd, session: HostileSession, files: Mapping[str, bytes] = FILES, *, shared: bool = False
) -> str:
    with SandboxClient(sandboxd.path) as client:
        return client.place_skill(session.name, digest_of(files), pack(files), shared=shared)


def run_script(session: HostileSession, script: str) -> str:
    return session.bash(script).streams.get("merged", b"").decode()


def test_a_skill_cannot_be_changed_from_inside_a_sandbox(sandboxd: OwnSandboxd) -> None:
    """Aim: replace a script that an operator trusts with a script of the model."""
    with sandboxd.session() as session:
        folder = place_skill(sandboxd, session)
        assert run_script(session, f"SKILL_DIR={folder} {folder}/scripts/run.sh") == "found"
        tries = [
            f"echo x > {folder}/data/word.txt",
            f"rm -rf {folder}",
            f"mv {folder} {folder}2",
            f"chmod -R 777 {folder}",
            "touch /skills/new",
            f"ln -s /etc {folder}/data/link",
            "mount -o remount,rw /skills",
            "umount /skills",
        ]
        for one in tries:
            assert session.bash(one).done["exit_code"] != 0, one
        assert run_script(session, f"SKILL_DIR={folder} {folder}/scripts/run.sh") == "found"
        shown = run_script(session, f"stat -c '%u %a' {folder}/scripts/run.sh {folder}/data/word.txt").splitlines()
        # With sandboxd's own start, the owner is no user of the sandbox.
        assert [line.split()[1] for line in shown] == ["755", "644"]
        assert {line.split()[0] for line in shown} <= {"0", "65534"}


def test_skills_of_another_tenant_cannot_be_found(sandboxd: OwnSandboxd) -> None:
    """Aim: find the skills of another tenant. All sandboxes mount the same volume, but a tenant's skills must stay
    hidden from other tenants.
    """
    secret = {**FILES, "data/word.txt": b"secret"}
    with sandboxd.session("acme") as owner, sandboxd.session("rival") as rival:
        folder = place_skill(sandboxd, owner, secret)
        assert run_script(owner, f"cat {folder}/data/word.txt") == "secret"
        assert "Permission denied" in run_script(rival, "ls /skills")
        assert "Permission denied" in run_script(rival, "cd / && find skills -mindepth 1")
        assert (
            run_script(rival, "echo /skills/*/data/word.txt; compgen -f /skills/ | wc -l")
            == "/skills/*/data/word.txt\n0\n"
        )
        with SandboxClient(sandboxd.path) as client:
            assert client.find_skill(rival.name, digest_of(secret), shared=False) is None
            assert client.find_skill(rival.name, digest_of(secret), shared=True) is None
            assert client.find_skill(owner.name, digest_of(secret), shared=False) == folder
        # The same content from another tenant is at another path.
        assert place_skill(sandboxd, rival, secret) != folder


@pytest.fixture(scope="module")
def rooted(engine: APIClient) -> Iterator[OwnSandboxd]:
    classes = {"default": {"user": "root", "workspace_bytes": 64 * 1024 * 1024}}
    settings = {"TOOLCREW_TENANT_CLASSES": json.dumps(classes), "TOOLCREW_SANDBOX_START": "oci"}
    with open_own_sandboxd(engine, settings) as opened:
        yield opened


NO_CAPABILITIES = "setpriv --inh-caps=-all --ambient-caps=-all --bounding-set=-all "


@pytest.mark.parametrize("prefix", ["", NO_CAPABILITIES], ids=["with capabilities", "without capabilities"])
def test_root_in_a_sandbox_cannot_find_skills_of_another_tenant(rooted: OwnSandboxd, prefix: str) -> None:
    """Aim: list the volume as root of the sandbox, who must be neither its owner nor have power over its files."""
    with rooted.session("acme") as owner, rooted.session("rival") as rival:
        folder = place_skill(rooted, owner)
        assert run_script(owner, f"{prefix}cat {folder}/data/word.txt") == "found"
        assert run_script(owner, f"SKILL_DIR={folder} {prefix}{folder}/scripts/run.sh") == "found"
        tries = [
            "ls /skills",
            "find /skills -mindepth 1",
            "sh -c 'cat /skills/*/SKILL.md'",
            "chmod 755 /skills",
            "chown 0 /skills",
            "touch /skills/new",
            "rm -rf /skills",
            f"chmod 777 {folder}",
            f"touch {folder}/new",
        ]
        for one in tries:
            answer = rival.bash(f"cd / && {prefix}{one} 2>/dev/null")
            assert (answer.done["exit_code"] != 0, answer.streams.get("merged", b"")) == (True, b""), one
        assert run_script(rival, f"{prefix}stat -c %u:%g /skills {folder}").split() == ["65534:65534"] * 2


def test_a_shared_skill_is_stored_once(sandboxd: OwnSandboxd) -> None:
    with sandboxd.session("acme") as one, sandboxd.session("rival") as other:
        folder = place_skill(sandboxd, one, shared=True)
        assert place_skill(sandboxd, other, shared=True) == folder
        assert run_script(other, f"cat {folder}/data/word.txt") == "found"


@pytest.mark.parametrize("name", ["../out", "/etc/passwd", "a/../../b", "./a", "a//b", ""])
def test_a_bundle_with_an_unsafe_path_is_refused(sandboxd: OwnSandboxd, name: str) -> None:
    """Aim of a compromised worker: write into another bundle, or outside of the volume."""
    files = {name: b"x", **FILES}
    with sandboxd.session() as session, SandboxClient(sandboxd.path) as client:
        with pytest.raises(ToolFailure, match="is not the archive"):
            client.place_skill(session.name, digest_of(files), pack(files), shared=False)
        assert client.find_skill(session.name, digest_of(files), shared=False) is None
        assert client.status()


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE])
def test_a_bundle_with_a_special_file_is_refused(sandboxd: OwnSandboxd, kind: bytes) -> None:
    odd, files = tarfile.TarInfo("data/odd"), {**FILES, "kind": kind}
    odd.type, odd.linkname = kind, "/etc/passwd"
    with (
        sandboxd.session() as session,
        SandboxClient(sandboxd.path) as client,
        pytest.raises(ToolFailure, match="is not the archive"),
    ):
        client.place_skill(session.name, digest_of(files), pack(files, odd), shared=False)


def test_a_sparse_bundle_uses_bounded_memory(sandboxd: OwnSandboxd) -> None:
    """Aim: exhaust the memory of sandboxd, so that the daemon and all its sandboxes are killed."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
        entry = tarfile.TarInfo("data")
        entry.pax_headers = {
            "GNU.sparse.major": "0",
            "GNU.sparse.minor": "1",
            "GNU.sparse.map": "0,1",
            "GNU.sparse.size": str(400 * 1024 * 1024),
        }
        entry.size = 1
        archive.addfile(entry, io.BytesIO(b"x"))
    sandboxd.reset_peak()
    before = sandboxd.peak_bytes()
    with (
        sandboxd.session() as session,
        SandboxClient(sandboxd.path) as client,
        pytest.raises(ToolFailure, match="is not the archive"),
    ):
        client.place_skill(session.name, "0" * 64, packed, shared=False)
    assert sandboxd.peak_bytes() - before < 64 * 1024 * 1024


def test_a_bundle_whose_content_differs_from_its_digest_is_refused(sandboxd: OwnSandboxd) -> None:
    with sandboxd.session() as session, SandboxClient(sandboxd.path) as client:
        for archive in (
            pack({**FILES, "data/word.txt": b"other"}),
            pack({}),
            io.BytesIO(b"x" * 5000),
            io.BytesIO(pack(FILES).getvalue()[:700]),
        ):
            with pytest.raises(ToolFailure, match="is not the archive"):
                client.place_skill(session.name, "0" * 64, archive, shared=False)
        assert client.find_skill(session.name, "0" * 64, shared=False) is None


def test_a_bundle_above_the_size_limit_uses_bounded_memory(sandboxd: OwnSandboxd) -> None:
    class Large(io.BytesIO):
        remaining = 200 * 1024 * 1024

        def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
            return self.remaining if whence == io.SEEK_END else 0

        def read(self, size: int | None = -1) -> bytes:
            sent = min(size or 0, self.remaining)
            self.remaining -= sent
            return b"x" * sent

    sandboxd.reset_peak()
    before = sandboxd.peak_bytes()
    with sandboxd.session() as session, SandboxClient(sandboxd.path) as client:
        with pytest.raises((ToolFailure, SandboxUnavailable)):
            client.place_skill(session.name, "0" * 64, Large(), shared=False)
        with SandboxClient(sandboxd.path) as other:
            assert other.status()
    assert sandboxd.peak_bytes() - before < 32 * 1024 * 1024


def test_a_call_cancelled_before_its_start_does_not_run(sandboxd: OwnSandboxd) -> None:
    """Aim: make sandboxd forget a cancel that arrives before the call starts, so that the script runs to its limit."""
    with sandboxd.session() as session, SandboxClient(sandboxd.path) as client:
        place_skill(sandboxd, session)
        assert not client.cancel(session.name, "called-off")
        request = {
            "op": "exec",
            "argv": ["touch", "/workspace/ran"],
            "script_bytes": 0,
            "cwd": "/workspace",
            "env": {},
            "timeout_s": 20,
        }
        request["capture"] = {"stdout": 1000, "stderr": 1000}
        with pytest.raises(ToolFailure) as refused:
            client.call(session.name, request, call_id="called-off")
        assert refused.value.code is ErrorCode.CANCELLED
        assert run_script(session, "ls /workspace") == ""
        assert "error" not in client.call(session.name, request, call_id="another").done
