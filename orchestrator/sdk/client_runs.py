"""Runs as a client of a pool has them: its tenant's, worked by the orchestrators that serve everybody."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

from contract.webhooks import Webhook
from orchestrator.runs.hosted import HostedRuns
from store.audit import Actor
from store.batches import Ground, RunBody
from store.runs import HostedRun, HostedState, RunPage


class ClientRuns:
    """Runs that live on without this program: some orchestrator works them (`toolcrew serve batches`, `toolcrew serve
    api`), any program of the tenant may follow them. Raises as HostedRuns does, and as the client's key does when it is
    good for nothing any more."""

    def __init__(
        self, hosted: HostedRuns, tenant: Callable[[], Awaitable[str]], actor: Callable[[], Awaitable[Actor]]
    ) -> None:
        """`tenant`: for whom, as long as the client's key is good for it; `actor`: who does it."""
        self._hosted = hosted
        self._tenant = tenant
        self._actor = actor

    async def start(
        self,
        instruction: RunBody | str,
        *,
        ground: Ground | None = None,
        word: str | None = None,
        metadata: Mapping[str, str] | None = None,
        priority: int = 0,
        webhook: Webhook | None = None,
    ) -> HostedRun:
        """Queue a run (HostedRuns.start). An instruction alone runs with the orchestrator's model and the tools that
        suit that model. `ground`: where the run works; its workspace and artifacts are files of the store.
        """
        body = RunBody(instruction=instruction) if isinstance(instruction, str) else instruction
        return await self._hosted.start(
            await self._tenant(),
            body,
            ground or Ground(),
            word=word,
            metadata=metadata,
            priority=priority,
            webhook=webhook,
        )

    async def get(self, run: str) -> HostedRun:
        """How a run stands, its answer whole."""
        return await self._hosted.get(await self._tenant(), run)

    async def list(self, *, cursor: str | None = None, limit: int = 50, state: HostedState | None = None) -> RunPage:
        """Some of them, the newest first (HostedRuns.list)."""
        return await self._hosted.list(await self._tenant(), cursor=cursor, limit=limit, state=state)

    async def cancel(self, run: str) -> HostedRun:
        """End a run: at once when it waits, else within 2 s."""
        return await self._hosted.cancel(await self._tenant(), run, actor=await self._actor())

    async def transcript(self, run: str) -> Sequence[dict[str, Any]]:
        """Its messages in the OpenAI wire shape, or those so far."""
        return await self._hosted.transcript(await self._tenant(), run)

    async def follow(self, run: str, after: str = "") -> AsyncIterator[tuple[str, str]]:
        """Its events as they come, (id, JSON) each, to the last one (HostedRuns.follow)."""
        async for entry in self._hosted.follow(await self._tenant(), run, after):
            yield entry

    async def told(self, run: str, after: str = "") -> AsyncIterator[tuple[str, str]]:
        """Its events until now."""
        async for entry in self._hosted.stored_events(await self._tenant(), run, after):
            yield entry
