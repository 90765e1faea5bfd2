"""Shapes that a line of an input file can have, as pydantic models, and their conversion to items."""

import os
import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from contract.calls import LONGEST_TIMEOUT_S, MAX_NAME_CHARS, MAX_TIMEOUT_S, pick_fields
from contract.sandboxes import SandboxOptions, pick_options
from orchestrator.dialects.profiles import ProfileName
from store.batches import (
    ARTIFACTS_FOLDER,
    CALLS_URL,
    CHAT_URL,
    MAX_ID_CHARS,
    RUNS_URL,
    BatchItem,
    CallBody,
    Grader,
    ItemEnvironment,
    RunBody,
    RunLimits,
)

_Id = Annotated[str, Field(min_length=1, max_length=MAX_ID_CHARS)]
_Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]
_Model = Annotated[str, Field(min_length=1, max_length=256)]
_Text = Annotated[str, Field(min_length=1)]
_Path = Annotated[str, Field(min_length=1, max_length=4096)]
Json = Any
"""A parsed JSON value. Pydantic does not check the value again, because the check would take longer than the parsing.
"""
_Roles = Literal["system", "developer", "user", "assistant", "tool"]


MAX_SAMPLES = 1000
_READABLE = ("/workspace/", "/output/", "/tmp/")  # folders of a sandbox


class InvalidField(Exception):
    """A field that cannot be accepted. `path`: position of the field. `message`: a sentence."""

    def __init__(self, path: tuple[str | int, ...], message: str) -> None:
        super().__init__(message)
        self.path = path
        self.message = message


class Shape(BaseModel):
    """Base of all shapes. Types are exact, and an unknown field is an error."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class OpenAILine(Shape):
    """A line of OpenAI's batch files. `url` selects the shape of `body`."""

    custom_id: _Id
    method: Literal["POST"]
    url: Literal["/v1/agent/runs", "/v1/tools/execute", "/v1/chat/completions"]
    body: dict[str, Json]


class LimitFields(Shape):
    """Fields of a line that limit a run: steps, time, tokens and cost."""

    max_iterations: int | None = Field(default=None, ge=1)
    tool_timeout_s: float | None = Field(default=None, gt=0, le=LONGEST_TIMEOUT_S)
    max_wall_s: float | None = Field(default=None, gt=0)
    max_tokens: int | None = Field(default=None, gt=0)
    max_cost: float | None = Field(default=None, gt=0)


class GraderFields(SandboxOptions, Shape):
    """Grading of items, and the options of the grader's sandbox."""

    command: Annotated[str, Field(min_length=1, max_length=65_536)]
    files: _Path | None = None
    image: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    artifacts: list[str] = []
    reward_file: _Path | None = None
    timeout_s: float = Field(default=MAX_TIMEOUT_S, gt=0, le=MAX_TIMEOUT_S)

    def to_grader(self) -> Grader:
        """Return the grader. Raises InvalidField: the reward file would be among the artifacts, or cannot be read."""
        reward_file = self.reward_file and os.path.normpath(os.path.join("/workspace", self.reward_file))
        if reward_file is not None and f"{reward_file}/".startswith(f"{ARTIFACTS_FOLDER}/"):
            raise InvalidField(
                ("grader", "reward_file"), f"the artifacts are in {ARTIFACTS_FOLDER}: let the grader write another file"
            )
        if reward_file is not None and not reward_file.startswith(_READABLE):
            raise InvalidField(("grader", "reward_file"), "a reward is read only below /workspace, /output or /tmp")
        return pick_fields(Grader, self, reward_file=reward_file, options=pick_options(self))


class EnvironmentFields(SandboxOptions, Shape):
    """Fields of a line for the item's environment and priority, and for the number of its attempts and samples."""

    workspace: _Path | None = None
    restore: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")] | None = None
    image: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    network: Literal["none", "egress"] | None = None
    fork: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")] | None = None
    artifacts: list[str] = []
    priority: int = Field(default=0, ge=-100, le=100)
    samples: int = Field(default=1, ge=1, le=MAX_SAMPLES)
    grader: GraderFields | None = None

    def to_environment(self) -> ItemEnvironment:
        """Return the environment of the item. Raises InvalidField: the line names two sources of files, or sets a field
        that a fork takes from its parent session.
        """
        if self.workspace is not None and self.restore is not None:
            raise InvalidField(
                ("restore",),
                "a session starts from a workspace or from a checkpoint: remove `workspace` or `restore`",
            )
        environment = pick_fields(ItemEnvironment, self)
        if self.fork is not None and environment != ItemEnvironment(fork=self.fork, artifacts=environment.artifacts):
            raise InvalidField(
                ("fork",),
                "a fork has the files, the image, the network and the sizes of its session: remove these, or `fork`",
            )
        return environment


class RunFields(EnvironmentFields):
    """Fields of the body of an agent run."""

    instruction: _Text | None = None
    input: _Text | None = None
    history: list[dict[str, Json]] = []
    model: _Model | None = None
    dialect: Literal["native", "tags", "json", "auto"] | None = None
    profile: ProfileName | None = None
    tools: list[_Name] | None = None
    limits: LimitFields = LimitFields()
    sampling: dict[str, Json] = {}
    keep_states: bool = False

    def to_work(self) -> RunBody:
        """Return the run. Raises InvalidField: a field cannot be accepted."""
        if (self.instruction is None) == (self.input is None):
            raise (
                InvalidField((), "`instruction` is missing: add it")
                if self.instruction is None
                else InvalidField(("input",), "`input` is an alias of `instruction`: remove one of them")
            )
        for number, message in enumerate(self.history):
            _check_message(message, ("history", number))
        for name in self.sampling:
            if name not in _RUN_SAMPLING:
                raise InvalidField(
                    ("sampling", name[:64]), f"`{name[:64]}` is not a sampling field: use {', '.join(_RUN_SAMPLING)}"
                )
        return pick_fields(RunBody, self, instruction=self.instruction or self.input or "", limits=_limits(self.limits))


class CallFields(EnvironmentFields):
    """Fields of the body of one tool call."""

    name: _Name
    arguments: dict[str, Json] = {}
    timeout_s: float | None = Field(default=None, gt=0, le=LONGEST_TIMEOUT_S)

    def to_work(self) -> CallBody:
        """Return the body of the item: a tool call."""
        return pick_fields(CallBody, self)


class ShortRun(RunFields):
    """An agent run in the short form."""

    id: _Id


class ShortCall(EnvironmentFields):
    """A tool call in the short form."""

    id: _Id
    tool: _Name
    arguments: dict[str, Json] = {}
    timeout_s: float | None = Field(default=None, gt=0, le=LONGEST_TIMEOUT_S)

    def to_work(self) -> CallBody:
        """Return the body of the item: a tool call."""
        return CallBody(name=self.tool, arguments=self.arguments, timeout_s=self.timeout_s)


class ChatFields(Shape):
    """Body of a plain chat completion. The model answers once and has no tools."""

    model: _Model | None = None
    messages: list[dict[str, Json]] = Field(min_length=1)
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    seed: int | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, Json] | None = None
    response_format: dict[str, Json] | None = None
    reasoning_effort: str | None = None
    user: str | None = None
    n: int | None = None
    stream: bool | None = None
    logprobs: bool | None = None
    store: bool | None = None
    tools: list[Json] | None = None
    tool_choice: Json = None
    parallel_tool_calls: bool | None = None

    def to_work(self) -> RunBody:
        """Return the run. Raises InvalidField: a field cannot be accepted."""
        self._check_unsupported()
        for number, message in enumerate(self.messages):
            _check_message(message, ("messages", number))
        last = len(self.messages) - 1
        if self.messages[-1]["role"] != "user":
            raise InvalidField(
                ("messages", last), "the last message does not have the role `user`: end with a message of the user"
            )
        sampling = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        return RunBody(
            instruction=_instruction(self.messages[-1], last),
            history=tuple(self.messages[:-1]),
            model=self.model,
            tools=(),
            limits=_ONE_STEP,
            sampling=sampling,
        )

    def _check_unsupported(self) -> None:
        """Raise InvalidField for fields that ask for something that a row cannot contain."""
        if self.n not in (None, 1):
            raise InvalidField(("n",), "a row contains one answer: remove `n`, and write a line for each answer")
        if self.stream:
            raise InvalidField(("stream",), "a row contains the complete answer: remove `stream`")
        if self.logprobs:
            raise InvalidField(("logprobs",), "rows contain no log probabilities: remove `logprobs`")
        if self.store:
            raise InvalidField(("store",), "answers are not stored at the endpoint: remove `store`")
        if self.tools or self.tool_choice not in (None, "none", "auto"):
            raise InvalidField(
                ("tools",) if self.tools else ("tool_choice",),
                f"a batch cannot call functions of the client: remove `tools` and `tool_choice`, or use the url "
                f"{RUNS_URL}, whose tools run in a sandbox",
            )


_SAMPLING = (
    *(
        "temperature",
        "top_p",
        "max_tokens",
        "max_completion_tokens",
        "seed",
        "stop",
        "presence_penalty",
        "frequency_penalty",
    ),
    *("logit_bias", "response_format", "reasoning_effort", "user"),
)
_RUN_SAMPLING = (*_SAMPLING, "top_k", "min_p", "logprobs", "top_logprobs", "return_token_ids")
"""Fields that every request of a run may have. The last three ask for the tokens of rollout records."""
_NO_LIMITS, _ONE_STEP = RunLimits(), RunLimits(max_iterations=1)

Fields = RunFields | CallFields | ShortCall | ChatFields
BODIES: dict[str, type[RunFields | CallFields | ChatFields]] = {
    RUNS_URL: RunFields,
    CALLS_URL: CallFields,
    CHAT_URL: ChatFields,
}
LIMIT_NAMES = tuple(LimitFields.model_fields)


def build_item(line: int, custom_id: Any, url: str, fields: Fields) -> BatchItem:
    """Return the item of a line. Raises InvalidField with the path inside `fields`. Raises ValidationError: the
    custom_id is invalid.
    """
    work = fields.to_work()
    if isinstance(fields, ChatFields):
        return BatchItem(custom_id=custom_id, line=line, url=url, work=work)
    return BatchItem(
        custom_id=custom_id,
        line=line,
        url=url,
        work=work,
        environment=fields.to_environment(),
        priority=fields.priority,
        grader=fields.grader.to_grader() if fields.grader is not None else None,
        task=custom_id if fields.grader is not None else "",
    )


def name_samples(custom_id: Any, samples: object) -> list[Any]:
    """Return the ids of the items of a line, one for each sample. The two arguments are unchecked JSON values."""
    if not isinstance(custom_id, str) or type(samples) is not int or not 1 < samples <= MAX_SAMPLES:
        return [custom_id]
    return [f"{custom_id}#{number}" for number in range(1, samples + 1)]


def _limits(fields: LimitFields) -> RunLimits:
    """Return the limits of an item. All items without limits share one record, because a batch has many items."""
    return RunLimits(**fields.model_dump()) if fields.model_fields_set else _NO_LIMITS


def _check_message(message: dict[str, Json], path: tuple[str | int, ...]) -> None:
    """Raise InvalidField if a message has an invalid role or content."""
    role, content = message.get("role"), message.get("content")
    if role not in _Roles.__args__:  # type: ignore[attr-defined]
        raise InvalidField((*path, "role"), f"`role` of a message is one of {', '.join(_Roles.__args__)}")  # type: ignore[attr-defined]
    has_calls = role == "assistant" and bool(message.get("tool_calls"))
    if not isinstance(content, str | list) and not (content is None and has_calls):
        raise InvalidField((*path, "content"), "`content` of a message is text, or a list of parts")


def _instruction(message: dict[str, Json], number: int) -> str:
    """Return the text of the last message. Raises InvalidField: the message contains anything other than text."""
    content = message.get("content")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    texts = []
    for part_number, part in enumerate(parts if isinstance(parts, list) else []):
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise InvalidField(
                ("messages", number, "content", part_number),
                "the last message may contain only text: put files into the workspace of a run",
            )
        texts.append(text)
    joined = "\n".join(texts)
    if not re.search(r"\S", joined):
        raise InvalidField(
            ("messages", number, "content"), "the last message is empty: add the text that the model answers"
        )
    return joined
