"""Images of sandboxes: pulled on first use, used by content id (so that a moved tag changes nothing), and removed when
they use too much disk space.

Invariant: sandboxd removes only images that it pulled, and only while nothing needs them. So a pull is recorded on disk
before it begins. An image is needed while a request waits for it, a session uses it, or a sandbox of it exists. The
engine also refuses to remove the image of any of its containers.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence, Set
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

import structlog

from toolcrew.concurrency.tasks import begin_shared
from toolcrew.contract.errors import SandboxUnavailable
from toolcrew.contract.image_names import ImageName, ImageNameError, advise_missing, find_matches, parse_image_name
from toolcrew.contract.tenant_classes import RegistryLogin
from toolcrew.workers.sandboxd.plans import Plans, SandboxPlan
from toolcrew.workers.sandboxd.pull_queue import PullQueue, PullTicket
from toolcrew.workers.sandboxd.records import ImageRecord, Records
from toolcrew.workers.sandboxd.runtime.engine_images import EngineImage, PullFailed, PullProgress, RegistryAccount

log = structlog.get_logger(__name__)

WAIT_S: Final = 30.0
"""Seconds that a call or the pool waits for a pull."""
REFRESH_S: Final = 60.0
"""Seconds between two comparisons with the engine. The operator may remove images there at any time."""
MAX_PRESENT_CHARS: Final = 8 * 1024
"""Maximum number of characters of all names of images in a report of this host."""
_MAX_ROWS: Final = 20
_LOG_S: Final = 10.0
CHECK_S: Final = 0.5
"""Seconds between two checks of the size of a running pull."""
_USE_RECORD_INTERVAL_S: Final = 60.0
"""Age of the recorded time of last use after which it is written again."""
_MASK: Final = "********"


class ImageNotReady(SandboxUnavailable):
    """Error: the image is still being pulled. A later request finds the image, or waits for the same pull."""


class ImageRefused(SandboxUnavailable):
    """Error: no host can get the image, because it does not exist or the registry does not allow it."""


class ImageEngine(Protocol):
    """The engine's operations on images (runtime/engine_images.py)."""

    async def find(self, name: str) -> EngineImage | None: ...

    async def list(self) -> Sequence[EngineImage]: ...

    async def used(self) -> Set[str]: ...

    async def remove(self, name: str) -> bool: ...

    async def pull(self, name: ImageName, account: RegistryAccount | None, progress: PullProgress) -> None: ...

    async def check_access(self, name: ImageName, account: RegistryAccount | None) -> None: ...


_OTHER_WRITES_BYTES = 256 * 1024 * 1024
"""Bytes by which the disk of a busy host may fill up during a pull, besides the image."""


@dataclass(frozen=True)
class PullDisk:
    """The disk of the engine's images. `free`: returns its free bytes. A pull ends when less than `keep_bytes` are
    free.
    """

    free: Callable[[], int]
    keep_bytes: int


class _PullStopped(PullFailed):
    """Error: sandboxd has stopped a pull. `is_too_large`: no host of this kind can pull the image."""

    def __init__(self, reason: str, *, is_too_large: bool) -> None:
        super().__init__(reason)
        self._is_too_large = is_too_large

    def explain(self, name: ImageName) -> SandboxUnavailable:
        kind = ImageRefused if self._is_too_large else SandboxUnavailable
        return kind(f"image {name.short} was not pulled: {self}")


class _PullSize:
    """Limits of a running pull. The registry tells sizes of compressed layers only, so the disk is measured too."""

    def __init__(self, budget_bytes: int, disk: PullDisk | None) -> None:
        self._budget_bytes = budget_bytes
        self._disk = disk
        self._free_before = disk.free() if disk is not None else 0

    def check(self, progress: PullProgress) -> None:
        """Raise _PullStopped when the image is too large, or the disk has too little free space."""
        _, total = progress.bytes()
        free = self._disk.free() if self._disk is not None else 0
        # Other programs write to the disk too.
        if max(total, self._free_before - free - _OTHER_WRITES_BYTES) > self._budget_bytes:
            raise _PullStopped(
                f"it needs more than the {self._budget_bytes} bytes of TOOLCREW_IMAGE_CACHE_BYTES; use a smaller image",
                is_too_large=True,
            )
        if self._disk is not None and free < self._disk.keep_bytes:
            raise _PullStopped(
                f"the disk of the engine would have less than {self._disk.keep_bytes} bytes free; free space "
                "there, or use a smaller image",
                is_too_large=False,
            )


@dataclass(eq=False)
class _Pull:
    """A pull that waits or runs."""

    image: str
    task: "asyncio.Task[None]"
    progress: PullProgress
    ticket: PullTicket
    began_at: float = field(default_factory=time.monotonic)

    def describe(self) -> dict[str, Any]:
        done, total = self.progress.bytes()
        return {
            "image": self.image,
            "bytes": done,
            "total_bytes": total,
            "seconds": round(time.monotonic() - self.began_at, 1),
        }


@dataclass(frozen=True)
class _Candidate:
    """An image that sandboxd pulled, under one name or several."""

    id: str
    names: tuple[str, ...]
    size_bytes: int
    used_at: float


class Images:
    """The images of this host's sandboxes.

    Set before `run`: `in_use`, a function that returns the content ids of the images of all sandboxes and sessions, and
    `release`, which is called with a content id before an image is removed, and removes the containers that protect the
    image (pins).
    """

    def __init__(
        self, engine: ImageEngine, plans: Plans, records: Records, budget_bytes: int, disk: PullDisk | None = None
    ) -> None:
        """`budget_bytes`: limit of the sum of the pulled images' sizes, and so of each image. `disk` None: pulls may
        fill the disk.
        """
        self._engine = engine
        self._plans = plans
        self._store = records
        self._budget_bytes = budget_bytes
        self.in_use: Callable[[], Set[str | None]] = frozenset
        self.release: Callable[[str], Awaitable[None]] | None = None
        self._records = {record.name: record for record in records.images()}
        self._pulls: dict[tuple[str, str], _Pull] = {}
        self._queue = PullQueue()
        self._disk = disk
        self._users = Counter[str]()
        self._removing: dict[str, asyncio.Event] = {}
        self._is_due = asyncio.Event()
        self._present: tuple[str, ...] = ()
        self._written_at: dict[str, float] = {}
        self._reported_bytes = 0

    @asynccontextmanager
    async def pinned(self, plan: SandboxPlan, wait_s: float = WAIT_S, tenant: str = "") -> AsyncIterator[SandboxPlan]:
        """Yield the plan with the content id of its image, which is pulled if the engine lacks it. The image is not
        removed inside the block. `tenant`: the tenant that waits for the image; "" for the pool.

        A plan that already has a content id keeps it while the engine has that image. Raises ImageNotReady after
        `wait_s` seconds, ImageRefused, and SandboxUnavailable.
        """
        name = parse_image_name(plan.image)
        # Count the image as used before the first await, so that from here on no removal can begin.
        keys = [name.full, *([plan.image_id] if plan.image_id is not None else [])]
        self._users.update(keys)
        try:
            for key in keys:
                await self._wait_removed(key)
            found = await self._find(name, plan, wait_s, tenant)
            while await self._wait_removed(found.id):  # The image was removed meanwhile: find it again.
                found = await self._find(name, plan, wait_s, tenant)
            keys.append(found.id)
            self._users[found.id] += 1
            self._record_use(found.id)
            yield replace(plan, image_id=found.id)
        finally:
            self._users.subtract(keys)
            self._users += Counter()  # `+=` with an empty Counter removes counts of zero.

    async def run(self) -> None:
        """Compare with the engine and remove images above the budget, until the task is cancelled."""
        while True:
            self._is_due.clear()
            try:
                await self.refresh()
                await self.evict()
            except SandboxUnavailable as error:
                log.warning("images_not_checked", error=str(error))
            except Exception:  # the outermost handler: a bug must not end sandboxd
                log.exception("cleanup_failed")
            with suppress(TimeoutError):
                async with asyncio.timeout(REFRESH_S):
                    await self._is_due.wait()

    async def refresh(self) -> None:
        """Read from the engine which images it has. Complete the records of pulls that a dead sandboxd began, and
        forget images that the engine no longer has.
        """
        # Skip pulls that run now or begin before the engine has answered: they change their records themselves.
        pulled = {pull.image for pull in self._pulls.values()}
        records = [record for record in self._records.values() if record.name not in pulled]
        listed = await self._engine.list()
        pulled = {pull.image for pull in self._pulls.values()}
        by_name = {name: image for image in listed for name in _names_of(image)}
        sizes = {image.id: image.size_bytes for image in listed}
        for record in records:
            current = self._records.get(record.name)
            if record.name in pulled or current is None or current.id != record.id:
                continue
            if record.id is None and (image := by_name.get(record.name)) is not None:
                log.info("pulled_image_found", image=record.name)
                self._keep(_build_record(parse_image_name(record.name), image, record.classes))
            elif record.id not in sizes:
                self._forget(record.name)
            elif record.size_bytes != sizes[record.id]:
                # With the engine's containerd store, only the list counts the unpacked layers.
                self._keep(replace(record, size_bytes=sizes[record.id]))
        self._present = self._list_present(by_name)

    def _list_present(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the names that sandboxd may pull, the last used first, with at most MAX_PRESENT_CHARS characters."""
        entries = self._plans.images()

        def last_use(name: str) -> float:
            return self._records[name].used_at if name in self._records else 0.0

        present, room = [], MAX_PRESENT_CHARS
        for text in sorted(names, key=lambda text: (-last_use(text), text)):
            name = parse_image_name(text)
            if any(found.names_registry for found in find_matches(entries, name)):
                room -= len(name.short)
                if room < 0:
                    break
                present.append(name.short)
        return tuple(present)

    async def evict(self) -> None:
        """Remove the least recently used images while the pulled images need more than the budget."""
        candidates = self._list_candidates()
        total = sum(candidate.size_bytes for candidate in candidates)
        if total <= self._budget_bytes:
            return
        used = await self._engine.used()
        for candidate in sorted(candidates, key=lambda candidate: candidate.used_at):
            if total <= self._budget_bytes:
                return
            if candidate.id not in used and await self._remove(candidate):
                total -= candidate.size_bytes
        if total > self._budget_bytes and total != self._reported_bytes:
            self._reported_bytes = total
            log.warning("image_cache_above_budget", bytes=total, budget_bytes=self._budget_bytes)

    def describe(self) -> dict[str, Any]:
        """Return the fields of `status`: names and patterns that sessions may use, names of images that sandboxd may
        pull and the engine has, running and waiting pulls, and the size of the pulled images.
        """
        return {
            "images": sorted(self._plans.images()),
            "images_present": list(self._present),
            "pulls": [pull.describe() for pull in list(self._pulls.values())[:_MAX_ROWS]],
            "image_cache": {
                "bytes": sum(candidate.size_bytes for candidate in self._list_candidates()),
                "budget_bytes": self._budget_bytes,
            },
        }

    async def close(self) -> None:
        """End all pulls."""
        pulls = list(self._pulls.values())
        for pull in pulls:
            pull.progress.stop()
            pull.task.cancel()
        await asyncio.gather(*(pull.task for pull in pulls), return_exceptions=True)

    async def _wait_removed(self, key: str) -> bool:
        """If the image is being removed, wait for the end and return True. Otherwise return False."""
        removing = self._removing.get(key)
        if removing is not None:
            await removing.wait()
        return removing is not None

    async def _find(self, name: ImageName, plan: SandboxPlan, wait_s: float, tenant: str) -> EngineImage:
        found = await self._engine.find(plan.image_id) if plan.image_id is not None else None
        if found is not None:
            return found
        found = await self._engine.find(name.full)
        may_pull = self._plans.may_pull(plan) and not name.is_id
        if found is None and may_pull:
            await self._wait_for_pull(name, plan.tenant_class, wait_s, tenant)
            found = await self._engine.find(name.full)
        if found is None:
            raise build_missing_error(plan.image, self._plans.may_pull(plan))
        if may_pull:
            await self._check_access(name, found.id, plan.tenant_class)
        return found

    async def _check_access(self, name: ImageName, image_id: str, tenant_class: str) -> None:
        """Raise ImageRefused if the image was pulled only with logins of other classes, and the registry does not let
        this class read it.
        """
        records = [record for record in self._records.values() if record.id == image_id]
        if not records or any(record.classes is None or tenant_class in record.classes for record in records):
            return
        login = self._plans.classes[tenant_class].registries.get(name.registry)
        account = None if login is None else _read_account(name.registry, login)
        try:
            await self._engine.check_access(name, account)
        except PullFailed as error:
            reason = _without_password(str(error), account)
            raise explain_pull_failure(reason, name, has_login=login is not None) from None
        for record in records:
            if record.name in self._records:
                self._keep(_add_class(self._records[record.name], tenant_class if login is not None else None))

    async def _wait_for_pull(self, name: ImageName, tenant_class: str, wait_s: float, tenant: str) -> None:
        """Wait for the pull of an image, and begin it if none runs. The pull continues when the caller is cancelled."""
        login = self._plans.classes[tenant_class].registries.get(name.registry)
        # Tenant classes with different logins at the registry do not share a pull.
        key = (name.full, tenant_class if login is not None else "")
        pull = self._pulls.get(key)
        if pull is None:
            ticket, progress = self._queue.join(tenant), PullProgress()
            reader = tenant_class if login is not None else None
            task = begin_shared(self._pull(name, reader, progress, ticket), "image-pull")
            pull = self._pulls[key] = _Pull(name.full, task, progress, ticket)
            task.add_done_callback(lambda task: self._end_pull(key, task))
        else:
            self._queue.share(pull.ticket, tenant)
        await asyncio.wait({pull.task}, timeout=wait_s)
        if not pull.task.done():
            done, total = pull.progress.bytes()
            # containerd does not tell the progress of a pull.
            shown = f" ({_size(done)} of at least {_size(total)})" if total else ""
            raise ImageNotReady(
                f"image {name.short} is still being pulled{shown}: try again in a minute; the pull continues"
            )
        if pull.task.cancelled():
            raise SandboxUnavailable("sandboxd is stopping: try again after its restart")
        pull.task.result()

    def _end_pull(self, key: tuple[str, str], task: "asyncio.Task[None]") -> None:
        self._queue.leave(self._pulls.pop(key).ticket)
        if not task.cancelled():
            task.exception()  # retrieve the exception, because all callers may have been cancelled

    async def _pull(
        self, name: ImageName, tenant_class: str | None, progress: PullProgress, ticket: PullTicket
    ) -> None:
        """Pull an image with the login of a class; None: without a login."""
        login = None if tenant_class is None else self._plans.classes[tenant_class].registries[name.registry]
        account = None if login is None else _read_account(name.registry, login)
        async with self._queue.turn(ticket):
            # Record the pull before it begins: after kill -9, the record shows that sandboxd pulled the image that the
            # engine then has, and for which class.
            if name.full not in self._records:
                classes = None if tenant_class is None else (tenant_class,)
                self._keep(ImageRecord(name.full, None, None, 0, time.time(), classes))
            log.info("image_pull_started", image=name.full)
            began_at = time.monotonic()
            try:
                await self._pull_checked(name, account, progress)
                image = await self._engine.find(name.full)
                if image is None:
                    raise PullFailed("the engine has no such image after the pull")
            except PullFailed as error:
                # Another class may have pulled the image at the same time.
                if (record := self._records.get(name.full)) is not None and record.id is None:
                    self._forget(name.full)
                reason = _without_password(str(error), account)
                log.warning("image_pull_failed", image=name.full, error=reason)
                if isinstance(error, _PullStopped):
                    raise error.explain(name) from None
                raise explain_pull_failure(reason, name, has_login=login is not None) from None
            self._complete(name, image, tenant_class)
            log.info(
                "image_pulled",
                image=name.full,
                id=image.id,
                bytes=image.size_bytes,
                seconds=round(time.monotonic() - began_at, 1),
            )
            self._is_due.set()

    def _complete(self, name: ImageName, image: EngineImage, tenant_class: str | None) -> None:
        """Record a complete pull. Classes that read the same content before may still use it."""
        before = self._records.get(name.full)
        known = before.classes if before is not None and before.id == image.id else ()
        self._keep(_add_class(_build_record(name, image, known), tenant_class))

    async def _pull_checked(self, name: ImageName, account: RegistryAccount | None, progress: PullProgress) -> None:
        """Pull an image, and stop the pull when the image is too large for this host."""
        size = _PullSize(self._budget_bytes, self._disk)
        size.check(progress)
        pulling, logged_at = asyncio.ensure_future(self._engine.pull(name, account, progress)), time.monotonic()
        try:
            while not (await asyncio.wait({pulling}, timeout=CHECK_S))[0]:
                size.check(progress)
                if time.monotonic() - logged_at >= _LOG_S:
                    logged_at, (done, total) = time.monotonic(), progress.bytes()
                    log.info("image_pulling", image=name.full, bytes=done, total_bytes=total)
        except asyncio.CancelledError:
            pulling.cancel()
            raise
        except _PullStopped:
            progress.stop()
            # The pull keeps its slot until the engine has ended it.
            await asyncio.wait({pulling})
            pulling.exception()
            raise
        await pulling

    def _list_candidates(self) -> list[_Candidate]:
        """Return the images that sandboxd pulled, each once with all of its names."""
        by_id: dict[str, list[ImageRecord]] = {}
        for record in self._records.values():
            if record.id is not None:
                by_id.setdefault(record.id, []).append(record)
        return [
            _Candidate(
                image_id,
                tuple(record.name for record in records),
                max(record.size_bytes for record in records),
                max(record.used_at for record in records),
            )
            for image_id, records in by_id.items()
        ]

    async def _remove(self, candidate: _Candidate) -> bool:
        """Remove an image under all names with which sandboxd pulled it. Return False if the image was not removed."""
        keys = (candidate.id, *candidate.names)
        # There is no await between this check and the marks below, so no request can begin to need the image meanwhile.
        if candidate.id in self.in_use() or any(self._users[key] for key in keys):
            return False
        removed = asyncio.Event()
        self._removing.update(dict.fromkeys(keys, removed))
        try:
            return await self._remove_marked(candidate)
        finally:
            for key in keys:
                del self._removing[key]
            removed.set()

    async def _remove_marked(self, candidate: _Candidate) -> bool:
        image = await self._engine.find(candidate.id)
        others = {name for name in _names_of(image) if "@" not in name} - set(candidate.names) if image else set()
        if others:
            # The operator has given the image another name, so it is no longer sandboxd's alone: keep it.
            log.info("pulled_image_left", image=candidate.names[0], names=sorted(others)[:10])
        elif image is not None:
            if self.release is not None:
                await self.release(candidate.id)
            for name in candidate.names:
                tagged = await self._engine.find(name)
                # The name may now refer to another image, which sandboxd did not pull.
                if tagged is not None and tagged.id == candidate.id and not await self._engine.remove(name):
                    return False
            if not await self._engine.remove(candidate.id):
                return False
            log.info("image_evicted", image=candidate.names[0], id=candidate.id, bytes=candidate.size_bytes)
        for name in candidate.names:
            self._forget(name)
        self._present = tuple(text for text in self._present if parse_image_name(text).full not in candidate.names)
        return True

    def _record_use(self, image_id: str) -> None:
        """Record the use of a pulled image."""
        now = time.time()
        for record in [record for record in self._records.values() if record.id == image_id]:
            self._records[record.name] = replace(record, used_at=now)
            # Sessions use an image often, so do not write every use to disk.
            if now - self._written_at.get(record.name, 0.0) > _USE_RECORD_INTERVAL_S:
                with suppress(SandboxUnavailable):  # a full disk must not stop a session whose image is present
                    self._keep(self._records[record.name])

    def _keep(self, record: ImageRecord) -> None:
        self._records[record.name] = record
        self._written_at[record.name] = time.time()
        self._store.keep_image(record)

    def _forget(self, name: str) -> None:
        self._records.pop(name, None)
        self._written_at.pop(name, None)
        self._store.forget_image(name)


_NO_VARIANT: Final = ("no matching manifest", "no match for platform")
_NO_IMAGE: Final = ("manifest unknown", "not found", "name unknown", "does not exist")
_NO_ACCESS: Final = ("denied", "unauthorized", "authentication required", "no basic auth", "forbidden")
_UNREACHABLE: Final = (
    "connection refused",
    "connection reset",
    "no such host",
    "timeout",
    "timed out",
    "no progress",
    "no route to host",
    "unreachable",
    "x509",
    "tls",
    "http response to https client",
    "eof",
)


def explain_pull_failure(reason: str, name: ImageName, *, has_login: bool) -> SandboxUnavailable:
    """Return the exception for a failed pull. It says why the image is missing and what to do. `reason`: the engine's
    text.
    """
    text, failed = reason.lower(), f"image {name.short} was not pulled"
    if "no space left" in text:
        return SandboxUnavailable(
            f"{failed}: the disk of the engine is full; free space there, or lower TOOLCREW_IMAGE_CACHE_BYTES"
        )
    if "toomanyrequests" in text or "rate limit" in text:
        return SandboxUnavailable(
            f"{failed}: the registry {name.registry} limits pulls ({reason}); try again later, or add a login to "
            "'registries' of the tenant class"
        )
    if any(part in text for part in _NO_VARIANT):
        return ImageRefused(f"{failed}: it has no variant for this machine's processor; use another image")
    if any(part in text for part in _NO_ACCESS):
        advice = "check the login of" if has_login else "if it is private, add a login for"
        return ImageRefused(
            f"{failed}: the registry refuses access ({reason}); check the name; {advice} {name.registry} in "
            "'registries' of the tenant class"
        )
    if any(part in text for part in _NO_IMAGE):
        return ImageRefused(f"{failed}: the registry {name.registry} has no such image ({reason}); check the name")
    if any(part in text for part in _UNREACHABLE):
        return SandboxUnavailable(
            f"{failed}: the engine cannot reach the registry {name.registry} ({reason}); check the engine's "
            "network, proxy and certificates"
        )
    return SandboxUnavailable(f"{failed}: {reason}; see the log of the engine")


def _read_account(registry: str, login: RegistryLogin) -> RegistryAccount:
    """Return user name and password of a registry login. The password file is read for each pull, so a new token needs
    no restart.
    """
    try:
        password = login.password_file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SandboxUnavailable(
            f"the password file for the registry {registry} cannot be read ({type(error).__name__}): check "
            "password_file in TOOLCREW_TENANT_CLASSES, and the rights of the file"
        ) from error
    return RegistryAccount(login.user, password)


def _without_password(text: str, account: RegistryAccount | None) -> str:
    return text.replace(account.password, _MASK) if account is not None and account.password else text


def build_missing_error(image: str, may_pull: bool) -> SandboxUnavailable:
    """Return the exception for an image that the engine does not have."""
    if may_pull:
        return SandboxUnavailable(f"the engine has no image {image}: pull it there, or use its name in the registry")
    return SandboxUnavailable(
        f"the engine of this host has no image {image}: {advise_missing(image)}. sandboxd pulls only images whose "
        "entry in TOOLCREW_SANDBOX_IMAGES_ALLOWED, or in `images` of the tenant class, begins with a registry"
    )


def _add_class(record: ImageRecord, tenant_class: str | None) -> ImageRecord:
    """Return the record with a class that can read the image; None: everyone can."""
    if tenant_class is None or record.classes is None:
        return replace(record, classes=None)
    return replace(record, classes=tuple(sorted({*record.classes, tenant_class})))


def _build_record(name: ImageName, image: EngineImage, classes: tuple[str, ...] | None) -> ImageRecord:
    repository = replace(name, tag=None, digest="").full
    digest = next(
        (text.rpartition("@")[2] for text in _names_of(image) if text.startswith(repository) and "@" in text), None
    )
    return ImageRecord(name.full, image.id, digest, image.size_bytes, time.time(), classes)


def _names_of(image: EngineImage) -> Iterable[str]:
    """Yield the complete names of an image. A name that toolcrew cannot parse is left out."""
    for text in (*image.tags, *image.digests):
        with suppress(ImageNameError):
            yield parse_image_name(text).full


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 1_000_000:.0f} MB"
