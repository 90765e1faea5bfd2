"""Runs that programs start by themselves, not as lines of a batch: what is kept of each, and how it is told."""

import json
import time
import zlib
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from pydantic import Field

from contract.calls import Clocks, Record
from store.batch_items import Failure, FailureKind, Outcome
from store.run_records import BatchDefaults, RunState

STANDING = "@runs"
"""The batch that they are items of, one a tenant, which never ends. No batch that anybody submits can be called so."""
MAX_PENDING = 10_000
"""Runs of a tenant that wait; one more is refused."""
MAX_KEPT = 100_000
"""Runs of a tenant that are listed; of more the oldest that have ended are forgotten."""
MAX_BODY_BYTES = 1024 * 1024
MAX_METADATA, MAX_METADATA_NAME, MAX_METADATA_TEXT = 16, 64, 512
SHOWN_INSTRUCTION, SHOWN_ANSWER = 300, 2000


class HostedState(StrEnum):
    """How far a run is. `waiting_for_approval`: it runs, and somebody is asked about one of its calls."""

    QUEUED = "queued"
    RUNNING = "running"
    WAITING_FOR_APPROVAL = "waiting_for_approval"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        return self in (HostedState.SUCCEEDED, HostedState.FAILED, HostedState.CANCELLED)


class RunUsage(Record):
    """Tokens, as the model's server counted them."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


class RunEnd(Record):
    """What a run came to. `failure` None: it succeeded. `answer`: the model's last text, also of a run that a limit stopped; `is_cut`: only its beginning,
    as lists and events have it. `cost` None: no prices are known. `clocks`: those of its calls, summed."""

    answer: str = ""
    is_cut: bool = False
    stop_reason: str | None = None
    steps: int = 0
    usage: RunUsage = RunUsage()
    cost: float | None = None
    clocks: Clocks = Clocks()
    failure: Failure | None = None


class HostedRun(Record):
    """A run as it stands. `instruction`: its beginning. `attempt`: above 1 when it was begun anew after a failure of the infrastructure. `end`: exactly
    when its state is final. Instants in Unix seconds of Redis's clock."""

    id: str
    tenant: str
    state: HostedState
    instruction: str
    model: str | None = None
    session: str | None = None
    metadata: dict[str, str] = Field(default_factory=dict)
    priority: int = 0
    attempt: int = 1
    created_at: float
    started_at: float | None = None
    ended_at: float | None = None
    end: RunEnd | None = None


class RunPage(Record):
    """Some runs, the newest first. `next_cursor` None: there are no more."""

    runs: tuple[HostedRun, ...]
    next_cursor: str | None = None


class About(Record):
    """What a list tells of a run's request."""

    instruction: str
    model: str | None = None
    session: str | None = None
    metadata: dict[str, str] = Field(default_factory=dict)


LISTED = ("state", "about", "priority", "attempt", "created_at", "started_at", "ended_at", "failure", "asking", "end", "batch")
"""The fields of a run's hash that tell how it stands."""


def parse_hosted(tenant: str, run: str, fields: Mapping[str, bytes | None]) -> HostedRun | None:
    """The run of these fields; None when it is gone, or an item of somebody's batch. Raises ValidationError for what another release wrote."""
    told = {name: value.decode() for name, value in fields.items() if value is not None}
    if told.get("batch") != STANDING or "about" not in told:
        return None
    about = About.model_validate_json(told["about"])
    end = parse_end(told["end"]) if told.get("end") else None
    return HostedRun(
        id=run,
        tenant=tenant,
        state=_state(told),
        **about.model_dump(),
        priority=int(told.get("priority", 0)),
        attempt=int(told.get("attempt", 1)),
        created_at=float(told["created_at"]),
        started_at=_instant(told.get("started_at")),
        ended_at=_instant(told.get("ended_at")),
        end=end,
    )


def build_end(outcome: Outcome) -> RunEnd:
    """What an outcome says, its answer whole."""
    body: Mapping[str, Any] = outcome.body or {}
    told = {name: body[name] for name in ("answer", "stop_reason", "steps", "usage", "cost", "clocks") if name in body}
    return RunEnd.model_validate({**told, "failure": outcome.failure}, strict=False)


def shorten_end(end: RunEnd) -> RunEnd:
    """As lists and events have it."""
    if len(end.answer) <= SHOWN_ANSWER:
        return end
    return end.model_copy(update={"answer": end.answer[:SHOWN_ANSWER], "is_cut": True})


def end_event(run: str, at: float, end: RunEnd) -> str:
    """The last event of a run, as JSON: what its hash keeps, too."""
    state = final_state(end.failure.kind.value if end.failure is not None else "")
    told = {"type": "RunEnded", "run": run, "at": at, "state": state.value, **shorten_end(end).model_dump(mode="json")}
    return json.dumps(told, separators=(",", ":"))


def pack_end(outcome: Outcome) -> tuple[Outcome, str, bytes]:
    """An outcome as its run's record keeps it, the run's last event, and its transcript, which lies beside the record; b"" for none."""
    body = dict(outcome.body or {})
    transcript = body.pop("transcript", None)
    kept = outcome.model_copy(update={"body": body}) if outcome.body is not None else outcome
    packed = zlib.compress(json.dumps(transcript).encode(), 3) if transcript is not None else b""
    return kept, end_event(outcome.run, time.time(), build_end(kept)), packed


def unpack_transcript(packed: bytes) -> list[dict[str, Any]]:
    """The messages of such a transcript."""
    messages: list[dict[str, Any]] = json.loads(zlib.decompress(packed))
    return messages


def parse_end(text: str) -> RunEnd:
    """The end that such an event tells of. Raises ValidationError."""
    told: dict[str, Any] = json.loads(text)
    return RunEnd.model_validate({name: told[name] for name in RunEnd.model_fields if name in told}, strict=False)


def final_state(failure: str) -> HostedState:
    """Of a run that has ended with that kind of failure; "": none."""
    if not failure:
        return HostedState.SUCCEEDED
    return HostedState.CANCELLED if failure == FailureKind.CANCELLED.value else HostedState.FAILED


def standing_defaults() -> BatchDefaults:
    """What holds for such a run where its request says nothing. Nobody watches it at a terminal: who is to allow a call is asked by the queue of questions."""
    return BatchDefaults(asks_people=True)


def _state(told: Mapping[str, str]) -> HostedState:
    match told.get("state"):
        case RunState.QUEUED.value:
            return HostedState.QUEUED
        case RunState.RUNNING.value:
            return HostedState.WAITING_FOR_APPROVAL if int(told.get("asking") or 0) else HostedState.RUNNING
        case _:
            return final_state(told.get("failure", ""))


def _instant(text: str | None) -> float | None:
    return float(text) or None if text else None
