"""The script of admission as Python sees it: what a step is told, and what it answers."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from contract.names import admission_prefix, slots_key
from orchestrator.admission.base import SlotRequest
from orchestrator.admission.waiting import WaitReason

LEASE_S = 20.0
"""How long a slot, or a place in the queue, outlives the last word of the orchestrator that has it."""
_FILES = ("state.lua", "operations.lua")

Operation = Sequence[object]


def load_script() -> str:
    """The source that Redis runs."""
    folder = resources.files("orchestrator.admission")
    return "\n".join(folder.joinpath(name).read_text(encoding="utf-8") for name in _FILES)


def grants_channel(deployment: str, orchestrator: str) -> str:
    """Where an orchestrator hears which of its calls another one's step has given a slot."""
    return f"{admission_prefix(deployment)}told:{orchestrator}"


def script_arguments(
    deployment: str, orchestrator: str, operations: Iterable[Operation], *, lease_s: float = LEASE_S, now: float | None = None
) -> list[str]:
    """ARGV of one step. `now`: Unix seconds; None: as Redis counts them."""
    told = json.dumps(list(operations), separators=(",", ":"))
    return [admission_prefix(deployment), slots_key(deployment, ""), orchestrator, repr(lease_s), "" if now is None else repr(now), told]


def enqueue(call: str, request: SlotRequest) -> Operation:
    """The call wants a slot. `call`: `<orchestrator>.<anything>`, different for each request."""
    return ("enqueue", call, *_terms(request))


def restore(call: str, request: SlotRequest) -> Operation:
    """The call has a slot, of which Redis does not know any more."""
    return ("restore", call, *_terms(request))


def release(call: str, used_s: float) -> Operation:
    """The call needs its slot, or its place in the queue, no longer. `used_s` 0: it did not run."""
    return ("release", call, used_s)


def renew(held: Sequence[str], waiting: Sequence[str]) -> Operation:
    """The leases go on."""
    return ("renew", list(held), list(waiting))


def tick(queues: Iterable[str]) -> Operation:
    """The slots of these queues may have changed."""
    return ("tick", *queues)


@dataclass(frozen=True)
class Answer:
    """The answer to one step. `granted`: calls of this orchestrator that have a slot; `refused`: calls that may not wait, with the seconds after which
    the caller can try again; `waiting`: calls that the step queued, with the reason why they wait; `unknown`: renewed calls that Redis does not know;
    `wake_s`: seconds until the rate of some tenant allows its next call."""

    granted: tuple[str, ...]
    refused: dict[str, float]
    waiting: dict[str, WaitReason]
    unknown: tuple[str, ...]
    wake_s: float | None


def parse_answer(text: bytes | str) -> Answer:
    """What the script returned. An empty table of Lua comes as an object."""
    told = json.loads(text)
    refused = {str(call): float(retry_after_s) for call, retry_after_s in told["refused"]}
    waiting = {str(call): WaitReason(reason) for call, reason in told["waiting"]}
    return Answer(tuple(told["granted"]), refused, waiting, tuple(told["unknown"]), told.get("wake"))


def _terms(request: SlotRequest) -> tuple[dict[str, Any], dict[str, Any]]:
    policy = request.policy
    call = {
        "tenant": request.tenant,
        "call": request.call_id,
        "queue": request.queue,
        "tool": request.tool,
        "limit": request.limit_s,
        "batch": request.priority == "batch",
        "urgent": request.is_urgent,
        "paused": policy.is_paused,
    }
    terms = {
        "weight": policy.weight,
        "in_flight": policy.in_flight,
        "queued": policy.queued,
        "rate": policy.rate_per_s or 0,
        "burst": policy.burst,
    }
    return call, terms
