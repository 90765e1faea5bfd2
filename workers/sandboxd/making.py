"""The one door through which containers come and go: recorded, labelled, started around a workspace, greeted, removed, forgotten."""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping

import structlog

from contract.errors import SandboxUnavailable
from workers.sandboxd.classes import SandboxPlan
from workers.sandboxd.counts import SandboxCounts
from workers.sandboxd.engine import (
    LABEL_CREATED_AT,
    LABEL_DEADLINE,
    LABEL_PRODUCT,
    LABEL_SANDBOXD,
    Engine,
)
from workers.sandboxd.image_faults import explained
from workers.sandboxd.plans import Profile
from workers.sandboxd.records import Records
from workers.sandboxd.room import Room
from workers.sandboxd.sandbox import Sandbox
from workers.sandboxd.settling import settle
from workers.sandboxd.workspaces.base import Workspace, Workspaces, WorkspaceSize

log = structlog.get_logger(__name__)


class Ending(SandboxUnavailable):
    """sandboxd is ending, and has done nothing of what was asked."""


class Maker:
    """Makes and unmakes sandboxes. What would not go is remembered, and its place taken, until it is gone."""

    def __init__(
        self,
        engine: Engine,
        profile: Profile,
        workspaces: Workspaces,
        records: Records,
        room: Room,
        owner: Mapping[str, str],
        guest_image: str,
        look: Callable[[SandboxPlan, WorkspaceSize, Sandbox], Awaitable[None]] | None = None,
    ) -> None:
        """`owner`: the labels deployment, sandboxd and lease. `guest_image`: one of ours, whose guest images without one are given.
        `look`: at a new sandbox of a plan, with a workspace of a size; raises SandboxUnavailable when it is not to be used.
        """
        self.engine = engine
        self.workspaces = workspaces
        self.room = room
        self.counts = SandboxCounts()
        self._profile = profile
        self._records = records
        self._owner = dict(owner)
        self._guest_image = guest_image
        self._look = look
        self._prefix = f"toolcrew-{owner[LABEL_SANDBOXD]}"
        self._known: set[str] = set()
        self._unwanted: dict[Sandbox, Workspace | None] = {}
        self._unwanted_workspaces: set[Workspace] = set()
        self._unconfirmed: set[str] = set()
        self.is_ending = False
        self.shortage: str | None = None

    async def make_workspace(self, plan: SandboxPlan) -> Workspace:
        """An empty one. Raises SandboxUnavailable."""
        size = WorkspaceSize(plan.workspace_bytes, plan.workspace_inodes)
        return await self.workspaces.make(secrets.token_hex(12), size)

    async def make(self, plan: SandboxPlan, workspace: Workspace, generation: int) -> Sandbox:
        """A started and greeted sandbox in a place of `room` that the caller has taken; from here on the place is ours to give back.

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
            volume = None if await self.engine.has_guest(plan.image) else await self.engine.ensure_guest_volume(self._guest_image)
            async with workspace.mounted() as mount:
                with explained(plan.image):
                    attached = await self.engine.start(self._profile.build_config(plan, mount, labels, volume), name)
        except BaseException:
            await asyncio.shield(self._confirm_gone(name))
            raise
        sandbox = Sandbox(self.engine, generation, attached.id, name, on_removed=lambda: self._forget(name), counts=self.counts)
        try:
            with explained(plan.image):
                await sandbox.attach(attached.sock)
            if self._look is not None:
                await self._look(plan, workspace.size, sandbox)
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

    def check_ending(self) -> None:
        """Raises Ending once sandboxd is ending."""
        if self.is_ending:
            raise Ending("sandboxd is ending: try again when it is back")

    def _check_may_start(self) -> None:
        self.check_ending()
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
            self.room.give_back()
