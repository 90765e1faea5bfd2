"""What happens in a batch, one record a thing: feeds the display, the log, `--json` and the report; one JSON object each."""

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from contract.calls import Clocks, Record
from store.batch_items import FailureKind, Outcome


class _Happening(Record):
    """`at`: Unix seconds. `item`: its custom_id; `run`: the id of its run; `attempt`: which of the item's it belongs to, from 1."""

    at: float
    item: str
    run: str = ""
    attempt: int = Field(default=1, ge=1)


class ItemStarted(_Happening):
    """Somebody has begun to work it. `waited_s`: in the queue since it was submitted, or given back. `attempt` above 1: again, after a failure; `is_resumed`:
    where a process left it that died."""

    type: Literal["item_started"] = "item_started"
    is_resumed: bool = False
    waited_s: float = 0.0
    orchestrator: str = ""


class ItemReady(_Happening):
    """Its sandbox is there and its workspace in it: limits of the run count from here. `setup_s`: since it was begun."""

    type: Literal["item_ready"] = "item_ready"
    setup_s: float = 0.0


class StepDone(_Happening):
    """A model has replied, and the calls of the reply are done. `model_s`: of the reply alone."""

    type: Literal["step_done"] = "step_done"
    step: int
    model_s: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0


class CallDone(_Happening):
    """A tool call has its result. `error_code` None: it succeeded. `seconds`: from its request to its result."""

    type: Literal["call_done"] = "call_done"
    call: str
    tool: str
    seconds: float
    error_code: str | None = None
    clocks: Clocks = Clocks()


class ItemDone(_Happening):
    """Its one end. `failure` None: it succeeded. `seconds`: since it was started; `cost` None: no prices are known."""

    type: Literal["item_done"] = "item_done"
    failure: FailureKind | None = None
    code: str = ""
    message: str = ""
    seconds: float = 0.0
    steps: int = 0
    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float | None = None


class ItemRetried(_Happening):
    """It is queued again after a failure. `attempt`: the one that is to come, so at least 2."""

    type: Literal["item_retried"] = "item_retried"
    attempt: int = Field(ge=2)
    failure: FailureKind
    code: str = ""


class BatchNoted(_Happening):
    """Something of the batch as a whole, `item` "": submitted, resumed, cancelling, an endpoint that is away. `is_warning`: the summary repeats it."""

    type: Literal["batch_noted"] = "batch_noted"
    item: str = ""
    message: str
    total: int | None = None
    is_warning: bool = Field(default=False, exclude_if=lambda is_warning: not is_warning)


Happening = Annotated[ItemStarted | ItemReady | StepDone | CallDone | ItemDone | ItemRetried | BatchNoted, Field(discriminator="type")]
_ANY: TypeAdapter[Happening] = TypeAdapter(Happening)


def build_recalled(outcome: Outcome, at: float) -> ItemDone:
    """The end of an item that was worked before anybody told of it here: with what its row says, and no time."""
    body, failure = outcome.body or {}, outcome.failure
    usage, cost, steps = body.get("usage"), body.get("cost"), body.get("steps")
    counts = usage if isinstance(usage, dict) else {}
    told = {
        "at": at,
        "item": outcome.custom_id,
        "run": outcome.run,
        "attempt": outcome.attempt,
        "failure": failure.kind if failure is not None else None,
        "code": failure.code if failure is not None else "",
        "message": failure.message if failure is not None else "",
        "steps": steps if isinstance(steps, int) else 0,
        "prompt_tokens": counts.get("prompt_tokens") or 0,
        "completion_tokens": counts.get("completion_tokens") or 0,
        "cost": cost if isinstance(cost, float) else None,
    }
    return ItemDone.model_validate(told)


def parse_happening(text: str | bytes) -> Happening:
    """One line of a log. Raises ValidationError for what is none."""
    return _ANY.validate_json(text)
