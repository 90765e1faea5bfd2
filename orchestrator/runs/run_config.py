"""The configuration of one run of an agent."""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from toolcrew.contract.run_events import OnEvent
from toolcrew.orchestrator.approvals import Approver
from toolcrew.orchestrator.loop.limits import ReActOptions
from toolcrew.orchestrator.runs.journal import RunJournal
from toolcrew.orchestrator.runs.run_gate import GatedRun, UngatedRun
from toolcrew.orchestrator.runs.run_model import send_at_once
from toolcrew.store.slots import Priority


async def _do_not_wait(_: str) -> None:
    """Default of `before_send`: do not wait."""


@dataclass(frozen=True)
class RunConfig:
    """Configuration of one run.

    `tenant`: pays for the run. `tools` None: the tools that suit the model. `gate`: receives the failures of the model.
    `sampling`: fields of every request to the model. `before_request`: is awaited before each new request.
    """

    run: str
    tenant: str
    journal: RunJournal
    dialect: str | None = None
    profile: str | None = None
    options: ReActOptions = field(default_factory=ReActOptions)
    tools: Iterable[str] | Literal["all"] | None = None
    on_event: OnEvent = lambda _: None
    shows_output: bool = False
    priority: Priority = "interactive"
    """Priority of the run's calls."""
    approver: Approver | None = None
    """Approver of the run's calls; None: the client's approver."""
    before_send: Callable[[str], Awaitable[None]] = _do_not_wait
    """Function that waits, before the call with that id is sent, until the run has its slot again: the run may have
    released the slot while people decided about the call.
    """
    gate: GatedRun | UngatedRun = field(default_factory=UngatedRun)
    sampling: Mapping[str, object] = field(default_factory=dict)
    before_request: Callable[[], Awaitable[None]] = send_at_once
    is_chat: bool = False
    """True: the model receives only the run's own messages and no system prompt."""
    copied_steps: int = 0
    """Number of the first steps that were copied from another run (Agent)."""
