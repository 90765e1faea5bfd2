"""Start and removal of sandboxes.

Invariant: every container is found again and removed, even if sandboxd is killed at any point. A container has labels
in the engine and a record on disk before it is started. Both stay until the engine has confirmed the removal. A failed
removal is remembered and tried again; until it succeeds, the container's slot is not given to another.
"""

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from typing import Any

import structlog

from toolcrew.contract.errors import SandboxUnavailable
from toolcrew.contract.metrics import COUNT, SANDBOX_START_SECONDS, SUM, bucket_part
from toolcrew.workers.sandboxd.background import settle
from toolcrew.workers.sandboxd.disks.base import Workspace, Workspaces, WorkspaceSize
from toolcrew.workers.sandboxd.images import WAIT_S, Images
from toolcrew.workers.sandboxd.plans import DEFAULT_RUNTIME, Profile, SandboxPlan
from toolcrew.workers.sandboxd.records import Records
from toolcrew.workers.sandboxd.runtime.attestation import AttestingGuest, ask_attestation, find_misfits
from toolcrew.workers.sandboxd.runtime.base import (
    LABEL_CREATED_AT,
    LABEL_DEADLINE,
    LABEL_PRODUCT,
    LABEL_SANDBOXD,
    PRODUCT,
    SandboxRuntime,
)
from toolcrew.workers.sandboxd.runtime.engines import ContainerEngine, open_runtime
from toolcrew.workers.sandboxd.runtime.hardening import ImageFacts
from toolcrew.workers.sandboxd.runtime.image_faults import FOLDERS, explained
from toolcrew.workers.sandboxd.sandbox import Sandbox
from toolcrew.workers.sandboxd.session import HostSession

log = structlog.get_logger(__name__)

SLOT_WAIT_S = 10.0
"""Time limit of all attempts to get a slot, in seconds."""
FREE_SLOT_TIMEOUT_S = 10.0
"""Time limit of one attempt, in seconds: the wait until another session has freed its slot."""
_CHECK_INTERVAL_S = 0.1
_MAX_FACTS = 1000


class SandboxSlots:
    """The slots of a host, one for each container. `free_slot` makes a pool or a session free its slot, and returns
    whether it succeeded.
    """

    def __init__(self, limit: int, wait_s: float = SLOT_WAIT_S) -> None:
        self.limit = limit
        self.used = 0
        self._wait_s = wait_s
        self.free_slot: Callable[[], Awaitable[bool]] | None = None
        self._making: set[asyncio.Future[bool]] = set()

    @property
    def is_full(self) -> bool:
        return self.used >= self.limit

    def try_take(self) -> bool:
        """Take a slot if one is free, without waiting. For work that no client waits for."""
        if self.is_full:
            return False
        self.used += 1
        return True

    async def take(self) -> None:
        """Take a slot, and make another session free its slot if necessary. Raises SandboxUnavailable when no slot is
        freed in time.
        """
        until = time.monotonic() + self._wait_s
        while not self.try_take():
            if await self._has_freed_slot():
                continue
            if time.monotonic() >= until:
                raise SandboxUnavailable(
                    f"this host already holds {self.limit} sandboxes, and all of them are busy: close sessions, add a "
                    "host, or raise TOOLCREW_MAX_SANDBOXES"
                )
            await asyncio.sleep(_CHECK_INTERVAL_S)

    def give_back(self) -> None:
        self.used -= 1

    async def _has_freed_slot(self) -> bool:
        """Make another holder free a slot. Return whether it did so in time. After the timeout the task continues,
        because a half-done eviction would lose the state of a session.
        """
        if self.free_slot is None:
            return False
        freeing = asyncio.ensure_future(self.free_slot())
        self._making.add(freeing)
        freeing.add_done_callback(self._making.discard)
        await asyncio.wait({freeing}, timeout=FREE_SLOT_TIMEOUT_S)
        return freeing.done() and freeing.result()


class SandboxCounts:
    """Counters that only grow. They start at zero with each process, which has a new `boot` id in `status`."""

    def __init__(self) -> None:
        self.oom = 0
        self.kills = Counter[str]()
        self.lost = Counter[str]()
        self._failed_starts = 0
        self._starts: dict[str, float] = {}

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Count and time the start of one container."""
        began = time.monotonic()
        try:
            yield
        except SandboxUnavailable:
            self._failed_starts += 1
            raise
        took_s = time.monotonic() - began
        for part, by in ((COUNT, 1.0), (SUM, took_s), (bucket_part(SANDBOX_START_SECONDS, took_s), 1.0)):
            if part is not None:
                self._starts[part] = self._starts.get(part, 0.0) + by

    def describe(self) -> dict[str, Any]:
        """Return the counters for `status`. `starts`: the histogram of start times, as contract/metrics.py names its
        parts.
        """
        return {
            "starts": dict(self._starts),
            "failed_starts": self._failed_starts,
            "oom": self.oom,
            "kills": dict(self.kills),
            "lost": dict(self.lost),
        }


def count_states(sessions: Iterable[HostSession], warm: int) -> dict[str, int]:
    """Return how many containers are in each state now."""
    states = Counter[str]({"busy": 0, "idle": 0, "paused": 0, "lost": 0})
    for session in sessions:
        if session.sandbox is None:
            continue
        if session.sandbox.lost is not None:
            states["lost"] += 1
        elif session.is_busy or session.is_streaming:
            states["busy"] += 1
        else:
            states["paused" if session.is_paused else "idle"] += 1
    return {**states, "warm": warm}


class SandboxdEnding(SandboxUnavailable):
    """Error: sandboxd is shutting down and has done nothing for the request."""

    def __init__(self) -> None:
        super().__init__("sandboxd is stopping: try again after its restart")


class SandboxFactory:
    """Creates and removes sandboxes. A failed removal is tried again, and its slot stays taken until it succeeds."""

    def __init__(
        self,
        engine: ContainerEngine,
        profile: Profile,
        workspaces: Workspaces,
        records: Records,
        slots: SandboxSlots,
        owner: Mapping[str, str],
        guest_image: str,
    ) -> None:
        """Create the factory. `owner`: the labels of deployment, sandboxd and lease. `guest_image`: a toolcrew image
        with the toolkit. The toolkit is mounted into every sandbox, so no image can bring a guest of its own.
        """
        self.engine = engine
        self._engine_runtime = open_runtime(engine)
        self.runtimes: Sequence[SandboxRuntime] = () if self._engine_runtime is None else (self._engine_runtime,)
        """All runtimes of this host. The first starts sandboxes, unless a class names a runtime of the engine."""
        self.workspaces = workspaces
        self.slots = slots
        self.counts = SandboxCounts()
        self._profile = profile
        self._records = records
        self._owner = dict(owner)
        self._guest_image = guest_image
        self._prefix = f"toolcrew-{owner[LABEL_SANDBOXD]}"
        self._container_names: set[str] = set()
        self._images: dict[str, str | None] = {}
        self._image_facts: dict[str, ImageFacts] = {}
        self._toolkit: str | None = None
        self._unwanted: dict[Sandbox, Workspace | None] = {}
        self._unwanted_workspaces: set[Workspace] = set()
        self._unconfirmed: dict[str, SandboxRuntime] = {}
        self.images: Images | None = None
        """Pulls and pins images. None: the engine has every image, and its name is used."""
        self.check_start: Callable[[SandboxPlan, WorkspaceSize, Sandbox], Awaitable[None]] | None = None
        """Checks a new sandbox and its workspace. Raises SandboxUnavailable when it is not to be used."""
        self.is_ending = False
        self.shortage: str | None = None

    def pinned(
        self, plan: SandboxPlan, wait_s: float = WAIT_S, tenant: str = ""
    ) -> AbstractAsyncContextManager[SandboxPlan]:
        """Return a context manager that gives the plan with the content id of its image. The image is not removed
        inside the block (Images.pinned).
        """
        return nullcontext(plan) if self.images is None else self.images.pinned(plan, wait_s, tenant)

    def images_in_use(self) -> set[str | None]:
        """Return the content ids of the images of all sandboxes that are not removed yet."""
        return set(self._images.values())

    def forget_image(self, image: str) -> None:
        """Drop what is cached about the image with this content id. If it is pulled again, its layers have other
        folders.
        """
        self._image_facts.pop(image, None)

    async def guest_volume(self) -> str:
        """Return the name of the volume with the guest. Raises SandboxUnavailable."""
        return await self.engine.ensure_guest_volume(self._guest_image)

    async def make_workspace(self, plan: SandboxPlan) -> Workspace:
        """Create an empty workspace. Raises SandboxUnavailable."""
        size = WorkspaceSize(plan.workspace_bytes, plan.workspace_inodes)
        return await self.workspaces.make(secrets.token_hex(12), size)

    def stacks(self, plan: SandboxPlan) -> bool:
        """Return whether a sandbox of this plan can use a workspace that is stacked on frozen ones."""
        return self.workspaces.kind == "image" and self._find_runtime(plan).stacks_layers

    def stack_workspace(self, below: Workspace) -> Workspace:
        """Create an empty workspace over a frozen one. Raises ToolFailure (NO_SPACE) and SandboxUnavailable."""
        workspace = self.workspaces.stack(secrets.token_hex(12), below)
        if workspace is None:
            raise SandboxUnavailable(
                f"workspaces of the kind {below.kind} cannot be the base of others: set "
                f"TOOLCREW_SANDBOX_WORKSPACE=image"
            )
        return workspace

    async def make(self, plan: SandboxPlan, workspace: Workspace, generation: int) -> Sandbox:
        """Start a sandbox and wait for the guest's hello. The caller has taken a slot, which the factory returns after
        the removal.

        Raises SandboxUnavailable. What was created is then removed, by the factory or by the next sweep.
        """
        with self.counts.starting():
            return await self._make(plan, workspace, generation)

    async def _make(self, plan: SandboxPlan, workspace: Workspace, generation: int) -> Sandbox:
        name = f"{self._prefix}-{secrets.token_hex(8)}"
        now = time.time()
        deadline = now + self._profile.life_s
        self._container_names.add(name)
        self._images[name] = plan.image_id
        runtime = self._find_runtime(plan)
        try:
            self._check_may_start()
            self._records.add_container(name, deadline)
            labels = {
                **self._owner,
                LABEL_PRODUCT: PRODUCT,
                LABEL_CREATED_AT: str(int(now)),
                LABEL_DEADLINE: str(int(deadline)),
            }
            with explained(plan.image, plan.image_id):
                image = await self._find_image(plan)
            volume = await self._find_toolkit(runtime)
            async with workspace.mounted() as mount:
                with explained(plan.image, plan.image_id):
                    spec = self._profile.build_spec(plan, mount, labels, volume, image)
                    attached = await runtime.start(spec, name)
        except BaseException:
            self._image_facts.clear()  # An image that was removed and pulled again has other folders.
            self._toolkit = None
            await asyncio.shield(self._confirm_removed(runtime, name))
            # The engine may have created the container despite the error, so the removal is shielded from a
            # cancellation.
            raise
        sandbox = Sandbox(
            runtime, spec, generation, attached.id, name, on_removed=lambda: self._forget(name), counts=self.counts
        )
        try:
            with explained(plan.image, plan.image_id):
                await sandbox.attach(attached)
            if self.check_start is not None:
                await self.check_start(plan, workspace.size, sandbox)
        except BaseException:
            await asyncio.shield(settle([self.discard(sandbox)]))
            raise
        return sandbox

    def _find_runtime(self, plan: SandboxPlan) -> SandboxRuntime:
        if plan.runtime == DEFAULT_RUNTIME or self._engine_runtime is None:
            return self.runtimes[0]
        return self._engine_runtime

    async def _find_image(self, plan: SandboxPlan) -> ImageFacts:
        """Return what the engine says about the plan's image. This never changes for a content id while the engine has
        the image, so it is cached.
        """
        if plan.image_id is None:
            return await self.engine.find_image(plan.image)
        if plan.image_id not in self._image_facts:
            if len(self._image_facts) >= _MAX_FACTS:
                self._image_facts.clear()
            self._image_facts[plan.image_id] = await self.engine.find_image(plan.image_id)
        return self._image_facts[plan.image_id]

    async def _find_toolkit(self, runtime: SandboxRuntime) -> str:
        """Return the volume with the toolkit. The engine recreates a missing volume empty, so each start by the engine
        checks the volume.
        """
        if self._toolkit is None or runtime is self._engine_runtime:
            self._toolkit = await self.guest_volume()
        return self._toolkit

    async def discard(self, sandbox: Sandbox, workspace: Workspace | None = None) -> None:
        """Remove a sandbox that no session has, and then its workspace. Failed removals are tried again later.

        Raises SandboxUnavailable when the engine refuses.
        """
        self._unwanted[sandbox] = workspace
        await sandbox.remove()
        self._unwanted.pop(sandbox, None)
        if workspace is not None:
            await self.discard_workspace(workspace)

    async def discard_workspace(self, workspace: Workspace) -> None:
        """Delete a workspace that no session has. A failure is logged and tried again later."""
        self._unwanted_workspaces.add(workspace)
        try:
            await workspace.remove()
        except SandboxUnavailable as error:
            log.error("workspace_not_removed", workspace=workspace.name, error=str(error))
        else:
            self._unwanted_workspaces.discard(workspace)

    async def retry_removals(self) -> None:
        """Try failed removals again."""
        names = [self._confirm_removed(runtime, name) for name, runtime in list(self._unconfirmed.items())]
        await settle([*names, *(self.discard(*pair) for pair in list(self._unwanted.items()))])
        for workspace in list(self._unwanted_workspaces):
            await self.discard_workspace(workspace)

    async def end(self) -> None:
        """Refuse new sandboxes from now on, and retry the failed removals."""
        self.is_ending = True
        await self.retry_removals()

    def knows(self, name: str) -> bool:
        """Return whether this process made the container with this name."""
        return name in self._container_names

    def _check_may_start(self) -> None:
        if self.is_ending:
            raise SandboxdEnding
        if self.shortage is not None:
            raise SandboxUnavailable(f"no sandbox is started now: {self.shortage}")

    async def _confirm_removed(self, runtime: SandboxRuntime, name: str) -> None:
        """Remove a container after a failed start. The engine may have created the container despite the error, or
        may create it later.
        """
        self._unconfirmed[name] = runtime
        try:
            await runtime.remove(name)
        except SandboxUnavailable as error:
            log.error("failed_start_not_cleared", container=name, error=str(error))
            return
        self._unconfirmed.pop(name, None)
        self._forget(name)

    def _forget(self, name: str) -> None:
        if name in self._container_names:
            self._container_names.discard(name)
            del self._images[name]
            self._records.forget_container(name)
            self.slots.give_back()


class WorkspaceNotMounted(SandboxUnavailable):
    """A sandbox started, but its /workspace is not the one that was made for it."""


class StartCheck:
    """Check of the first sandbox of each image and runtime. Pairs that passed are not checked again. `is_hard`: the
    file system of a workspace enforces its size.
    """

    def __init__(self, is_hard: bool) -> None:
        self._is_hard = is_hard
        self._passed: set[tuple[str, str]] = set()

    async def check(self, plan: SandboxPlan, size: WorkspaceSize, sandbox: AttestingGuest) -> None:
        """Check a new sandbox with a workspace of that size.

        Raises WorkspaceNotMounted, and SandboxUnavailable when the guest does not attest.
        """
        checked = (plan.image_id or plan.image, plan.runtime)
        if checked in self._passed:
            return
        attestation = await ask_attestation(sandbox)
        misfits = find_misfits(attestation, size.bytes, size.inodes) if self._is_hard else []
        if misfits:
            raise WorkspaceNotMounted(
                f"a sandbox of image {plan.image} does not have its workspace: {'; '.join(misfits)}; {FOLDERS}"
            )
        self._passed.add(checked)
