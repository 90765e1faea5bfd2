"""Schema of ATIF 1.7, the Agent Trajectory Interchange Format, as pydantic models. The schema and its rules follow
the public specification. Exported trajectories must fit it.
"""

from datetime import datetime
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

ATIF_VERSION: Final = "ATIF-v1.7"
Extra = dict[str, Any] | None


class _Part(BaseModel):
    """Base of all parts of the document. An unknown field is an error."""

    model_config = ConfigDict(extra="forbid")


class ImageSource(_Part):
    """Image of a message."""

    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    path: str


class ContentPart(_Part):
    """Part of a message: either a text or an image."""

    type: Literal["text", "image"]
    text: str | None = None
    source: ImageSource | None = None

    @model_validator(mode="after")
    def _check(self) -> "ContentPart":
        """Check that the part has only the field of its type."""
        if (self.text is None) == (self.type == "text") or (self.source is None) == (self.type == "image"):
            raise ValueError("a part of type text has only `text`, and a part of type image has only `source`")
        return self


Content = str | list[ContentPart]


class AtifAgent(_Part):
    """Agent of the trajectory."""

    name: str
    version: str
    model_name: str | None = None
    tool_definitions: list[dict[str, Any]] | None = None
    extra: Extra = None


class AtifToolCall(_Part):
    """Tool call of a step."""

    tool_call_id: str
    function_name: str
    arguments: dict[str, Any]
    extra: Extra = None


class SubagentTrajectoryRef(_Part):
    """Reference to the trajectory of a subagent."""

    trajectory_id: str | None = None
    trajectory_path: str | None = None
    session_id: str | None = None
    extra: Extra = None

    @model_validator(mode="after")
    def _check(self) -> "SubagentTrajectoryRef":
        """Check that the reference has an id or a path."""
        if self.trajectory_id is None and self.trajectory_path is None:
            raise ValueError("a reference to a trajectory needs an id or a path")
        return self


class AtifObservationResult(_Part):
    """Result of one tool call."""

    source_call_id: str | None = None
    content: Content | None = None
    subagent_trajectory_ref: list[SubagentTrajectoryRef] | None = None
    extra: Extra = None


class AtifObservation(_Part):
    """Results of a step."""

    results: list[AtifObservationResult]


class AtifMetrics(_Part):
    """Tokens and cost of one step."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    cost_usd: float | None = None
    prompt_token_ids: list[int] | None = None
    completion_token_ids: list[int] | None = None
    logprobs: list[float] | None = None
    extra: Extra = None


class AtifStep(_Part):
    """A step: a system prompt, a message of the user, or a reply with its calls and their results."""

    step_id: int = Field(ge=1)
    timestamp: str | None = None
    source: Literal["system", "user", "agent"]
    model_name: str | None = None
    reasoning_effort: str | float | None = None
    message: Content
    reasoning_content: str | None = None
    tool_calls: list[AtifToolCall] | None = None
    observation: AtifObservation | None = None
    metrics: AtifMetrics | None = None
    llm_call_count: Annotated[int, Field(ge=0)] | None = None
    is_copied_context: bool | None = None
    extra: Extra = None

    @model_validator(mode="after")
    def _check(self) -> "AtifStep":
        """Check that the fields fit the source of the step and that each result belongs to a call."""
        if self.timestamp is not None:
            datetime.fromisoformat(self.timestamp)
        of_agents = ("model_name", "reasoning_effort", "reasoning_content", "tool_calls", "metrics")
        if self.source != "agent" and (forbidden := [name for name in of_agents if getattr(self, name) is not None]):
            raise ValueError(f"only steps of the agent have {', '.join(forbidden)}")
        if (
            self.source == "agent"
            and self.llm_call_count == 0
            and (self.metrics is not None or self.reasoning_content is not None)
        ):
            raise ValueError("a step without a model call has neither metrics nor reasoning_content")
        called = {call.tool_call_id for call in self.tool_calls or ()}
        for result in self.observation.results if self.observation and self.tool_calls is not None else ():
            if result.source_call_id is not None and result.source_call_id not in called:
                raise ValueError(f"the observation {result.source_call_id} does not belong to a call of this step")
        return self


class AtifFinalMetrics(_Part):
    """Tokens and cost of the whole trajectory."""

    total_prompt_tokens: int | None = None
    total_completion_tokens: int | None = None
    total_cached_tokens: int | None = None
    total_cost_usd: float | None = None
    total_steps: int | None = None
    extra: Extra = None


class AtifTrajectory(_Part):
    """The ATIF document."""

    schema_version: Literal[
        "ATIF-v1.0", "ATIF-v1.1", "ATIF-v1.2", "ATIF-v1.3", "ATIF-v1.4", "ATIF-v1.5", "ATIF-v1.6", "ATIF-v1.7"
    ] = ATIF_VERSION  # fmt: skip
    session_id: str | None = None
    trajectory_id: str | None = None
    agent: AtifAgent
    steps: list[AtifStep]
    notes: str | None = None
    final_metrics: AtifFinalMetrics | None = None
    continued_trajectory_ref: str | None = None
    extra: Extra = None
    subagent_trajectories: "list[AtifTrajectory] | None" = None

    @model_validator(mode="after")
    def _check(self) -> "AtifTrajectory":
        """Check the step numbers and the ids of the subagents' trajectories."""
        if [step.step_id for step in self.steps] != list(range(1, len(self.steps) + 1)):
            raise ValueError("the steps must be numbered from 1 without gaps")
        ids = [inner.trajectory_id for inner in self.subagent_trajectories or ()]
        if None in ids or len(set(ids)) != len(ids):
            raise ValueError("each trajectory of a subagent needs a different trajectory_id")
        return self
