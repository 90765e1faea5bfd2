"""The line with which sandboxd opens a connection: whose it is, and what that session may reach."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from workers.egress.verdicts import Verdict, bad_gateway
from workers.sandboxd.classes import EgressRules

Name = Annotated[str, Field(min_length=1, max_length=256)]


class Opening(BaseModel):
    """One line of JSON, the end of the line included. There are no default rules: a session without any reaches
    nothing.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    v: Literal[1]
    tenant: Name
    session: Name
    rules: EgressRules


def parse_opening(line: bytes) -> Opening:
    """Raises Refusal for anything else than an opening of this version."""
    try:
        return Opening.model_validate_json(line)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the line"
        raise bad_gateway(
            Verdict.BAD_OPENING,
            f"sandboxd did not say what this session may reach ({where}: {first['msg']}), so nothing can be reached: "
            "tell the operator",
        ) from None
