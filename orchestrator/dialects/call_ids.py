"""Ids of calls: ours, which are idempotency keys, and those that a message shows the model."""

import hashlib
import re

_FITTING = re.compile(r"[A-Za-z0-9_-]{1,64}")
_SHORT = re.compile(r"[A-Za-z0-9]{9}")


def build_call_id(run: str, step: int, index: int) -> str:
    """Our id of the call at `index` of that reply: the same whenever it is made, and no other call's. Fits
    `contract.calls.Identifier`.

    The model's own id would not do: it is random, repeated or missing.
    """
    plain = f"{run}-{step}-{index}"
    if _FITTING.fullmatch(plain):
        return plain
    return f"{hashlib.sha256(run.encode(errors='surrogatepass')).hexdigest()[:40]}-{step}-{index}"


def build_missing_id(run: str, step: int, position: int) -> str:
    """The id under which the model gets the result of a native call that it gave none. Never one of ours: those mark
    calls by tags.
    """
    return f"call_{build_call_id(run[:40], step, position)}"[:64]


def build_short_id(model_id: str, call_id: str) -> str:
    """The model's id if it is nine alphanumerics, which Mistral's templates insist on; else such a one made from
    ours.
    """
    if _SHORT.fullmatch(model_id):
        return model_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:9]
