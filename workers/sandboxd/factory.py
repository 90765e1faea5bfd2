"""Starts and removes sandboxes: counted, recorded, labelled, started around a workspace, checked once, and forgotten
when they are gone.
"""

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import structlog

from contract.errors import SandboxUnavailable
from contract.metrics import COUNT, SANDBOX_START_SECONDS, SUM, bucket_part
from workers.sandboxd.background import settle
from workers.sandboxd.disks.base import Workspace, Workspaces, WorkspaceSize
from workers.sandboxd.plans import Profile, SandboxPlan
from workers.sandboxd.records import Records
from workers.sandboxd.runtime.attestation import Guest, ask_attestation, explain_lacks, find_misfits
from workers.sandboxd.runtime.engine import (
    LABEL_CREATED_AT,
    LABEL_DEADLINE,
    LABEL_PRODUCT,
    LABEL_SANDBOXD,
    Engine,
)
from workers.sandboxd.runtime.image_faults import FOLDERS, explained
from workers.sandboxd.sandbox import Sandbox
from workers.sandboxd.session import Session

log = structlog.get_logger(__name__)

SLOT_WAIT_S = 10.0
"""How long a session waits for a place that others may give up."""
GIVE_UP_S = 10.0
"""And for one that is about to give its place up."""
_LOOK_S = 0.1


class SandboxSlots:
    """Places for containers. `free_slot` is asked to give one up, and tells whether it did."""

    def __init__(self, limit: int, wait_s: float = SLOT_WAIT_S) -> None:
        self.limit = limit
        self.taken = 0
        self._wait_s = wait_s
        self.free_slot: Callable[[], Awaitable[bool]] | None = None
        self._making: set[asyncio.Future[bool]] = set()

    @property
    def is_full(self) -> bool:
        return self.taken >= self.limit

    def try_take(self) -> bool:
        """A place at once, or none: for what nobody waits for."""
        if self.is_full:
            return False
        self.taken += 1
        return True

    async def take(self) -> None:
        """A place, for which others may have to give theirs up. Raises SandboxUnavailable when nobody can in time."""
        until = time.monotonic() + self._wait_s
        while not self.try_take():
            if await self._has_freed_slot():
                continue
            if time.monotonic() >= until:
                raise SandboxUnavailable(
                    f"this host already holds {self.limit} sandboxes, and all of them work: close sessions, add a "
                    "host, or raise TOOLCREW_MAX_SANDBOXES"
                )
            await asyncio.sleep(_LOOK_S)

    def give_back(self) -> None:
        self.taken -= 1

    async def _has_freed_slot(self) -> bool:
        """Who gives a place up does so to the end, also when it takes longer than anybody waits: half of it done is a
        session's state lost.
        """
        if self.free_slot is None:
            return False
        making = asyncio.ensure_future(self.free_slot())
        self._making.add(making)
        making.add_done_callback(self._making.discard)
        await asyncio.wait({making}, timeout=GIVE_UP_S)
        return making.done() and making.result()


class SandboxCounts:
    """Totals, which only grow. They end with the process: its `boot` says when they begin anew."""

    def __init__(self) -> None:
        self.oom = 0
        self.kills = Counter[str]()
        self.lost = Counter[str]()
        self._failed_starts = 0
        self._starts: dict[str, float] = {}

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Around the start of one container."""
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
        """For `status`. `starts`: by part of the histogram (contract/metrics.py)."""
        return {
            "starts": dict(self._starts),
            "failed_starts": self._failed_starts,
            "oom": self.oom,
            "kills": dict(self.kills),
            "lost": dict(self.lost),
        }


def count_states(sessions: Iterable[Session], warm: int) -> dict[str, int]:
    """How many containers are in which state now."""
    states = Counter[str]({"busy": 0, "idle": 0, "paused": 0, "lost": 0})
    for session in sessions:
        if session.sandbox is None:
            continue
        if session.sandbox.lost is not None:
            states["lost"] += 1
        elif session.is_busy:
            states["busy"] += 1
        else:
            states["paused" if session.is_paused else "idle"] += 1
    return {**states, "warm": warm}


class SandboxdEnding(SandboxUnavailable):
    """sandboxd is ending, and has done nothing of what was asked."""

    def __init__(self) -> None:
        super().__init__("sandboxd is ending: try again when it is back")


class SandboxFactory:
    """Makes and unmakes sandboxes. What would not go is remembered, and its place taken, until it is gone."""

    def __init__(
        self,
        engine: Engine,
        profile: Profile,
        workspaces: Workspaces,
        records: Records,
        slots: SandboxSlots,
        owner: Mapping[str, str],
        guest_image: str,
    ) -> None:
        """`owner`: the labels deployment, sandboxd and lease. `guest_image`: one of ours, whose guest images without
        one are given.
        """
        self.engine = engine
        self.workspaces = workspaces
        self.slots = slots
        self.counts = SandboxCounts()
        self._profile = profile
        self._records = records
        self._owner = dict(owner)
        self._guest_image = guest_image
        self._prefix = f"toolcrew-{owner[LABEL_SANDBOXD]}"
        self._known: set[str] = set()
        self._unwanted: dict[Sandbox, Workspace | None] = {}
        self._unwanted_workspaces: set[Workspace] = set()
        self._unconfirmed: set[str] = set()
        self.check_start: Callable[[SandboxPlan, WorkspaceSize, Sandbox], Awaitable[None]] | None = None
        """Checks a new sandbox and its workspace. Raises SandboxUnavailable when it is not to be used."""
        self.is_ending = False
        self.shortage: str | None = None

    async def make_workspace(self, plan: SandboxPlan) -> Workspace:
        """An empty one. Raises SandboxUnavailable."""
        size = WorkspaceSize(plan.workspace_bytes, plan.workspace_inodes)
        return await self.workspaces.make(secrets.token_hex(12), size)

    async def make(self, plan: SandboxPlan, workspace: Workspace, generation: int) -> Sandbox:
        """A started and greeted sandbox in a place of `room` that the caller has taken; from here on the place is ours
        to give back.

        Raises SandboxUnavailable; what was created is then removed, by the sweep if need be.
        """
        with self.counts.starting():
            return await self._make(plan, workspace, generation)

    async def _make(self, plan: SandboxPlan, workspace: Workspace, generation: int) -> Sandbox:
        name = f"{self._prefix}-{secrets.token_hex(8)}"
        now = time.time()
        deadline = now + self._profile.life_s
        self._known.add(name)
        try:
            self._check_may_start()
            self._records.add_container(name, deadline)
            labels = {
                **self._owner,
                LABEL_PRODUCT: "sandbox",
                LABEL_CREATED_AT: str(int(now)),
                LABEL_DEADLINE: str(int(deadline)),
            }
            volume = (
                None
                if await self.engine.has_guest(plan.image)
                else await self.engine.ensure_guest_volume(self._guest_image)
            )
            async with workspace.mounted() as mount:
                with explained(plan.image):
                    attached = await self.engine.start(self._profile.build_config(plan, mount, labels, volume), name)
        except BaseException:
            await asyncio.shield(self._confirm_gone(name))
            raise
        sandbox = Sandbox(
            self.engine, generation, attached.id, name, on_removed=lambda: self._forget(name), counts=self.counts
        )
        try:
            with explained(plan.image):
                await sandbox.attach(attached.sock)
            if self.check_start is not None:
                await self.check_start(plan, workspace.size, sandbox)
        except BaseException:
            await asyncio.shield(settle([self.discard(sandbox)]))
            raise
        return sandbox

    async def discard(self, sandbox: Sandbox, workspace: Workspace | None = None) -> None:
        """Remove a sandbox that no session has, and then its workspace; remembered until they are gone.

        Raises SandboxUnavailable when the engine refuses.
        """
        self._unwanted[sandbox] = workspace
        await sandbox.remove()
        self._unwanted.pop(sandbox, None)
        if workspace is not None:
            await self.discard_workspace(workspace)

    async def discard_workspace(self, workspace: Workspace) -> None:
        """Delete a workspace that no session has any more; what would not go is tried again."""
        self._unwanted_workspaces.add(workspace)
        try:
            await workspace.remove()
        except SandboxUnavailable as error:
            log.error("workspace_not_removed", workspace=workspace.name, error=str(error))
        else:
            self._unwanted_workspaces.discard(workspace)

    async def retry_removals(self) -> None:
        """Try again what would not go."""
        names = [self._confirm_gone(name) for name in list(self._unconfirmed)]
        await settle([*names, *(self.discard(*one) for one in list(self._unwanted.items()))])
        for workspace in list(self._unwanted_workspaces):
            await self.discard_workspace(workspace)

    async def end(self) -> None:
        """From now on none is made, and what is unwanted goes."""
        self.is_ending = True
        await self.retry_removals()

    def knows(self, name: str) -> bool:
        """Whether a container of that name is one of this process's."""
        return name in self._known

    def _check_may_start(self) -> None:
        if self.is_ending:
            raise SandboxdEnding
        if self.shortage is not None:
            raise SandboxUnavailable(f"no sandbox is started now: {self.shortage}")

    async def _confirm_gone(self, name: str) -> None:
        """After a start that failed: the engine may have made the container all the same, or still be about to."""
        self._unconfirmed.add(name)
        try:
            await self.engine.remove(name)
        except SandboxUnavailable as error:
            log.error("failed_start_not_cleared", container=name, error=str(error))
            return
        self._unconfirmed.discard(name)
        self._forget(name)

    def _forget(self, name: str) -> None:
        if name in self._known:
            self._known.discard(name)
            self._records.forget_container(name)
            self.slots.give_back()


class WorkspaceMissed(SandboxUnavailable):
    """A sandbox started, and its /workspace is not the one that was made for it."""


class StartCheck:
    """Remembers the images, by runtime, whose sandboxes were as they should be. `is_hard`: whether a workspace's size
    is its file system's.
    """

    def __init__(self, is_hard: bool) -> None:
        self._is_hard = is_hard
        self._seen: set[tuple[str, str]] = set()

    async def check(self, plan: SandboxPlan, size: WorkspaceSize, sandbox: Guest) -> None:
        """At a new sandbox with a workspace of that size; what its image lacks is logged.

        Raises WorkspaceMissed, and SandboxUnavailable when its guest does not tell.
        """
        if (plan.image, plan.runtime) in self._seen:
            return
        found = await ask_attestation(sandbox)
        misfits = find_misfits(found, size.bytes, size.inodes) if self._is_hard else []
        if misfits:
            raise WorkspaceMissed(
                f"a sandbox of image {plan.image} does not get its workspace: {'; '.join(misfits)}; {FOLDERS}"
            )
        for lack in explain_lacks(found, plan.image):
            log.warning("image_lacks_a_program", lack=lack)
        self._seen.add((plan.image, plan.runtime))
