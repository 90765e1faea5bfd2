"""The fields of a run, with their rules: the only place where a field or a limit of a run stands.

The requests of the HTTP API, the lines of batches and the limits of the loop (ReActOptions) inherit from these records.
"""

from typing import Annotated, Literal, Self, get_args

from pydantic import Field, JsonValue

from toolcrew.contract.calls import LONGEST_TIMEOUT_S, Record
from toolcrew.contract.session_spec import SessionSpec

DialectName = Literal["native", "tags", "json", "auto"]
ProfileName = Literal["small", "standard", "auto"]
DIALECT_NAMES: tuple[DialectName, ...] = get_args(DialectName)
PROFILE_NAMES: tuple[ProfileName, ...] = get_args(ProfileName)
MaxIterations = Annotated[int, Field(ge=1, le=10_000)]
MaxWallS = Annotated[float, Field(gt=0, le=30 * 86_400)]
MaxTokens = Annotated[int, Field(ge=1, le=2**53)]
MaxCost = Annotated[float, Field(gt=0, le=1e12)]
ToolTimeoutS = Annotated[float, Field(gt=0, le=LONGEST_TIMEOUT_S)]


def _is_none(value: object) -> bool:
    return value is None


class CommonLimits(Record):
    """The limits of a run that every request may set. None: the limit of the batch applies, or else the default of
    ReActOptions.
    """

    max_iterations: MaxIterations | None = Field(
        default=None, exclude_if=_is_none, description="Limit of model replies. Default: 5."
    )
    max_wall_s: MaxWallS | None = Field(
        default=None, exclude_if=_is_none, description="Limit of the seconds of a run, without its setup."
    )
    max_tokens: MaxTokens | None = Field(
        default=None, exclude_if=_is_none, description="Limit of the prompt and completion tokens."
    )
    enable_tool_action_parsing: bool | None = Field(
        default=None, exclude_if=_is_none, description="Read tags in the text of replies as calls. Default: true."
    )


class RunLimits(CommonLimits):
    """The limits of a run. `tool_timeout_s`: limit of a call for which neither the call nor its tool sets one."""

    tool_timeout_s: ToolTimeoutS | None = Field(default=None, exclude_if=_is_none)
    max_cost: MaxCost | None = Field(
        default=None,
        exclude_if=_is_none,
        description="Largest cost. Needs prices of the batch, or prices of the model endpoint.",
    )

    def with_defaults(self, defaults: "RunLimits") -> Self:
        """Return a copy with the values of `defaults` for limits that are not set here."""
        return self.model_copy(update=defaults.model_dump() | self.model_dump())


class ModelChoice(Record):
    """The model of a run. None: the values of the batch apply, or else those of the orchestrator."""

    model: Annotated[str, Field(min_length=1, max_length=256)] | None = Field(
        default=None, exclude_if=_is_none, description="The model."
    )
    dialect: DialectName | None = Field(default=None, exclude_if=_is_none, description="The format of tool calls.")
    profile: ProfileName | None = Field(
        default=None, exclude_if=_is_none, description="The tools and texts for the model. Default: `auto`."
    )


class RunBody(ModelChoice):
    """An agent run. `history`: messages before the instruction, in the OpenAI format. `tools` None: all tools that
    suit the model. `keep_states`: keep the state of the session before each request to the model, so that the run can
    be forked there.
    """

    instruction: str = Field(min_length=1)
    history: tuple[dict[str, JsonValue], ...] = ()
    tools: tuple[str, ...] | None = None
    limits: RunLimits = RunLimits()
    sampling: dict[str, JsonValue] = Field(default_factory=dict)
    """Fields that are added unchanged to every request to the model (`ModelRequest.extra`)."""
    keep_states: bool = Field(default=False, exclude_if=lambda keeps: not keeps)


class ItemEnvironment(SessionSpec):
    """The environment of an item: its own session, or an open session. `artifacts`: patterns below /workspace of files
    to copy out at the end. `session`: an open session of the tenant, which stays open; the options of a new session are
    then not used.
    """

    artifacts: tuple[str, ...] = ()
    session: str | None = Field(default=None, exclude_if=lambda session: session is None)
