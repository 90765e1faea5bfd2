"""Ids of calls: the run's own ids, which are idempotency keys, and the ids that messages show to the model."""

import hashlib
import re

_FITTING = re.compile(r"[A-Za-z0-9_-]{1,64}")
_SHORT = re.compile(r"[A-Za-z0-9]{9}")


def build_call_id(run: str, step: int, index: int) -> str:
    """Return the run's own id of the call at `index` of a reply. The id is repeatable and unique, and matches
    `toolcrew.contract.calls.Identifier`.

    The model's own id is not usable: it can be random, repeated or missing.
    """
    plain = f"{run}-{step}-{index}"
    if _FITTING.fullmatch(plain):
        return plain
    return f"{hashlib.sha256(run.encode(errors='surrogatepass')).hexdigest()[:40]}-{step}-{index}"


def build_missing_id(run: str, step: int, position: int) -> str:
    """Return an id for a native call that the model sent without one.

    The id never equals one of the run's own ids, because an own id in a message shows that the call was made by a tag.
    """
    return f"call_{build_call_id(run[:40], step, position)}"[:64]


def build_short_id(model_id: str, call_id: str) -> str:
    """Return the model's id if it has nine alphanumeric characters, else nine characters derived from the run's own id.

    Mistral's chat templates require nine alphanumeric characters.
    """
    if _SHORT.fullmatch(model_id):
        return model_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:9]
