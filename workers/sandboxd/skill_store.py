"""The skill bundles that sandboxes of this sandboxd can read. Each bundle is stored once.

All sandboxes mount the same volume read-only, so its names must protect the bundles of one tenant from another. The top
folder cannot be listed, and the folder of a bundle is an HMAC with a secret of this process. A program can only find
the folder of a skill that its session runs, even if it knows the digest of another bundle. No user of a sandbox owns
the files, not even its root user: the volume is mounted without the sandbox's id map (runtime/oci.py).
"""

import asyncio
import hashlib
import hmac
import io
import secrets
import tarfile
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import IO

import structlog

from toolcrew.contract.errors import ErrorCode, SandboxUnavailable, ToolFailure
from toolcrew.contract.skills import MAX_ARCHIVE_BYTES, MAX_BUNDLE_BYTES, MAX_BUNDLE_FILES, BundleDigest
from toolcrew.contract.tar_archives import read_tar
from toolcrew.workers.sandboxd.background import settle
from toolcrew.workers.sandboxd.leases import Lease
from toolcrew.workers.sandboxd.runtime.base import LABEL_DEPLOYMENT, LABEL_LEASE, LABEL_SANDBOXD
from toolcrew.workers.sandboxd.runtime.engines import ContainerEngine
from toolcrew.workers.sandboxd.runtime.hardening import AUTHORITIES, SKILLS_FOLDER

log = structlog.get_logger(__name__)

MAX_TOTAL_BYTES = 2 * 1024**3
"""Maximum size of all bundles until sandboxd restarts, in bytes. The bundles are on the engine's disk."""
MAX_TENANT_BYTES = 256 * 1024**2
"""Maximum size of a tenant's bundles, in bytes. A tenant can install and replace skills freely, and must not use the
space of other tenants.
"""
_MEMORY_BYTES = 1024 * 1024


class SkillVolume:
    """The volume with the skill bundles. It exists as long as this process. `image`: any image that the engine has, for
    the container that unpacks bundles. `spool`: a folder on a disk for bundles that arrive; None: that of the system.
    """

    def __init__(
        self, engine: ContainerEngine, image: str, owner: Mapping[str, str], spool: Path | None = None
    ) -> None:
        self.volume = f"toolcrew-skills-{secrets.token_hex(8)}"
        self._engine = engine
        self._image = image
        self.owner = dict(owner)
        self._spool = None if spool is None else str(spool)
        self._secret = secrets.token_bytes(32)
        self._places: dict[tuple[str, str], str] = {}
        self._bytes: Counter[str] = Counter()
        self._placing = asyncio.Lock()

    async def open(self) -> None:
        """Create the volume. Raises SandboxUnavailable."""
        await self._engine.make_skill_volume(self.volume, self.owner)

    async def close(self) -> None:
        """Remove the volume. A volume that a container uses stays; the sweep of the next sandboxd removes it."""
        await self._remove(self.volume)

    async def sweep(self, lease: Lease) -> None:
        """Remove the volumes of dead sandboxds of this deployment. Raises SandboxUnavailable when the engine does not
        answer.
        """
        listed = await self._engine.list_skill_volumes(f"{LABEL_DEPLOYMENT}={self.owner[LABEL_DEPLOYMENT]}")
        leftovers = [name for name, labels in listed.items() if name != self.volume and self._is_left(labels, lease)]
        await settle([self._remove(name) for name in leftovers])

    def find(self, scope: str, digest: str) -> str | None:
        """Return the folder of a bundle in every sandbox, or None when it is not placed. `scope`: as in `place`."""
        return self._places.get((scope, digest))

    async def place(self, scope: str, digest: str, chunks: AsyncIterator[bytes]) -> str:
        """Store the bundle of that digest and return its folder in every sandbox. The chunks are a tar archive of its
        files, sorted by path.

        `scope`: the tenant, or "" for a bundle that all tenants share. Raises ToolFailure when the archive is not that
        bundle, SandboxUnavailable, and the errors of `chunks`.
        """
        with tempfile.SpooledTemporaryFile(_MEMORY_BYTES, dir=self._spool) as received:
            async for chunk in chunks:
                if received.tell() + len(chunk) > MAX_ARCHIVE_BYTES:
                    raise ToolFailure(
                        ErrorCode.INVALID_ARGUMENTS,
                        f"the skill is larger than {MAX_ARCHIVE_BYTES} bytes: remove files that it does not use",
                    )
                received.write(chunk)
            # Unpack one bundle at a time, so that two requests for one bundle do not unpack into the same folder.
            async with self._placing:
                folder = self.find(scope, digest)
                return folder or await self._place(scope, digest, received)

    async def place_authorities(self, bundle: bytes) -> None:
        """Write the file with the certificate authorities that programs of sessions with secrets trust. Raises
        SandboxUnavailable.
        """
        path = Path(AUTHORITIES.lstrip("/"))
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w", format=tarfile.PAX_FORMAT) as packed:
            packed.addfile(_folder(str(path.parent.parent), 0o711))
            packed.addfile(_folder(str(path.parent), 0o755))
            entry = tarfile.TarInfo(str(path))
            entry.size, entry.mode = len(bundle), 0o444
            packed.addfile(entry, io.BytesIO(bundle))
        archive.seek(0)
        await self._engine.fill_skill_volume(self.volume, self._image, archive)

    async def _place(self, scope: str, digest: str, received: IO[bytes]) -> str:
        size = received.tell()
        if scope and self._bytes[scope] + size > MAX_TENANT_BYTES:
            raise ToolFailure(
                ErrorCode.QUOTA_EXCEEDED,
                f"the skills that tenant {scope} has used on this host take more than {MAX_TENANT_BYTES // 2**20} MiB: "
                "use fewer or smaller ones, or ask the operator to restart sandboxd",
            )
        if self._bytes.total() + size > MAX_TOTAL_BYTES:
            raise SandboxUnavailable(
                f"the skills of this host take more than {MAX_TOTAL_BYTES // 2**30} GiB: remove some, and restart "
                f"sandboxd"
            )
        name = hmac.new(self._secret, f"{scope}\0{digest}".encode(), hashlib.sha256).hexdigest()[:32]
        with tempfile.SpooledTemporaryFile(_MEMORY_BYTES, dir=self._spool) as archive:
            await asyncio.to_thread(_repack, received, archive, name, digest)
            archive.seek(0)
            await self._engine.fill_skill_volume(self.volume, self._image, archive)
        self._bytes[scope] += size
        self._places[scope, digest] = folder = f"{SKILLS_FOLDER}/{name}"
        log.info("skill_placed", digest=digest, bytes=size)
        return folder

    def _is_left(self, labels: Mapping[str, str], lease: Lease) -> bool:
        # Only this process holds the name of the sandboxd, and it made no other volume: an earlier process made this
        # one.
        return labels.get(LABEL_SANDBOXD) == self.owner[LABEL_SANDBOXD] or lease.is_dead(labels.get(LABEL_LEASE, ""))

    async def _remove(self, volume: str) -> None:
        try:
            await self._engine.remove_skill_volume(volume)
        except SandboxUnavailable as error:
            log.warning("skill_volume_not_removed", volume=volume, error=str(error))


def _repack(received: IO[bytes], archive: IO[bytes], name: str, digest: str) -> None:
    """Repack the files below `name`, owned by root and read-only. Only regular files are accepted. Raises
    ToolFailure when the files do not match the digest.
    """
    bundle_digest, folders, top = BundleDigest(), {""}, SKILLS_FOLDER.strip("/")
    try:
        with tarfile.open(fileobj=archive, mode="w", format=tarfile.PAX_FORMAT) as packed:
            packed.addfile(_folder(top, 0o711))
            packed.addfile(_folder(f"{top}/{name}", 0o755))
            size = 0
            for number, member in enumerate(read_tar(received, 2 * MAX_BUNDLE_FILES)):
                size += member.size
                if number >= MAX_BUNDLE_FILES or size > MAX_BUNDLE_BYTES or member.kind != "file":
                    raise _build_mismatch(digest)
                if not _is_plain(member.name):
                    raise _build_mismatch(digest)
                for folder in _parents(member.name):
                    if folder not in folders:
                        folders.add(folder)
                        packed.addfile(_folder(f"{top}/{name}/{folder}", 0o755))
                data, is_executable = member.read(received), member.is_executable
                bundle_digest.add(member.name, data, is_executable=is_executable)
                entry = tarfile.TarInfo(f"{top}/{name}/{member.name}")
                entry.size, entry.mode = len(data), 0o755 if is_executable else 0o644
                packed.addfile(entry, io.BytesIO(data))
    except ValueError as error:
        raise _build_mismatch(digest) from error
    if bundle_digest.hexdigest() != digest:
        raise _build_mismatch(digest)


def _folder(name: str, mode: int) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode = tarfile.DIRTYPE, mode
    return entry


def _is_plain(path: str) -> bool:
    return bool(path) and all(part not in ("", ".", "..") for part in path.split("/"))


def _parents(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:depth]) for depth in range(1, len(parts))]


def _build_mismatch(digest: str) -> ToolFailure:
    return ToolFailure(
        ErrorCode.INVALID_ARGUMENTS, f"the received data is not the archive of the skill with the digest {digest}"
    )
