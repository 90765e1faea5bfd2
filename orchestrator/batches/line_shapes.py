"""Formats that a line of a batch's input file can have, as pydantic models, and their conversion to batch items."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from toolcrew.contract.calls import LONGEST_TIMEOUT_S, MAX_NAME_CHARS, MAX_TIMEOUT_S, Identifier, pick_fields
from toolcrew.contract.image_names import ImageText
from toolcrew.contract.run_spec import ItemEnvironment, ModelChoice, RunBody, RunLimits
from toolcrew.contract.session_spec import SandboxOptions, SessionOptions, WorkspaceName, pick_options
from toolcrew.store.batches import (
    ARTIFACTS_FOLDER,
    CALLS_URL,
    CHAT_URL,
    MAX_ID_CHARS,
    RUNS_URL,
    BatchItem,
    CallBody,
    Grader,
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
_READABLE = ("/workspace/", "/output/", "/tmp/")  # folders of a sandbox whose files a program can read


@dataclass(frozen=True)
class InvalidField:
    """A field that cannot be accepted. `path`: position of the field. `message`: a sentence."""

    path: tuple[str | int, ...]
    message: str


class Shape(BaseModel):
    """Base class of all formats. Values are not converted to other types, and an unknown field is an error."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class OpenAILine(Shape):
    """A line of OpenAI's batch files. `url` selects the shape of `body`."""

    custom_id: _Id
    method: Literal["POST"]
    url: Literal["/v1/agent/runs", "/v1/tools/execute", "/v1/chat/completions"]
    body: dict[str, Json]


class LimitFields(RunLimits, Shape):
    """Field `limits` of a line."""


class GraderFields(SandboxOptions, Shape):
    """Grading of items, and the options of the grader's sandbox."""

    command: Annotated[str, Field(min_length=1, max_length=65_536)]
    files: WorkspaceName | None = None
    image: ImageText | None = None
    artifacts: list[str] = []
    reward_file: _Path | None = None
    timeout_s: float = Field(default=MAX_TIMEOUT_S, gt=0, le=MAX_TIMEOUT_S)

    def find_errors(self) -> Iterator[InvalidField]:
        """Yield an error if the grader could not use its secrets, or for a reward file that would be among the
        artifacts or cannot be read.
        """
        if self.secrets:
            yield InvalidField(
                ("grader", "secrets"), "a grader runs without network, so it cannot use secrets: remove them"
            )
        reward_file = self._reward_path()
        if reward_file is not None and f"{reward_file}/".startswith(f"{ARTIFACTS_FOLDER}/"):
            yield InvalidField(
                ("grader", "reward_file"),
                f"{ARTIFACTS_FOLDER} contains the artifacts of the item: let the grader write its reward elsewhere",
            )
        elif reward_file is not None and not reward_file.startswith(_READABLE):
            yield InvalidField(
                ("grader", "reward_file"), "the path is outside of /workspace, /output and /tmp: use one of these"
            )

    def to_grader(self) -> Grader:
        """Return the grader."""
        return pick_fields(Grader, self, reward_file=self._reward_path(), options=pick_options(self))

    def _reward_path(self) -> str | None:
        return self.reward_file and os.path.normpath(os.path.join("/workspace", self.reward_file))


class EnvironmentFields(SessionOptions, Shape):
    """Fields of a line for the item's environment and priority, and for the number of its attempts and samples."""

    workspace: WorkspaceName | None = None
    fork: Identifier | None = None
    artifacts: list[str] = []
    priority: int = Field(default=0, ge=-100, le=100)
    samples: int = Field(default=1, ge=1, le=MAX_SAMPLES)
    grader: GraderFields | None = None

    def find_errors(self) -> Iterator[InvalidField]:
        """Yield each field that cannot be accepted, such as a second source of files."""
        if self.workspace is not None and self.restore is not None:
            yield InvalidField(
                ("restore",),
                "a session starts from a workspace or from a checkpoint: remove `workspace` or `restore`",
            )
        if self.fork is not None:
            environment = self.to_environment()
            if environment != ItemEnvironment(fork=self.fork, artifacts=environment.artifacts):
                yield InvalidField(
                    ("fork",),
                    "a fork has the files, image, network, sizes and `tool_config` of its session: remove these "
                    "fields, or `fork`",
                )
        if self.grader is not None:
            yield from self.grader.find_errors()

    def to_environment(self) -> ItemEnvironment:
        """Return the environment of the item."""
        return pick_fields(ItemEnvironment, self)


class RunFields(EnvironmentFields, ModelChoice):
    """Fields of an agent run in a line."""

    instruction: _Text | None = None
    input: _Text | None = None
    history: list[dict[str, Json]] = []
    tools: list[_Name] | None = None
    limits: LimitFields = LimitFields()
    sampling: dict[str, Json] = {}
    keep_states: bool = False

    def find_errors(self) -> Iterator[InvalidField]:
        """Yield each field that cannot be accepted."""
        if (self.instruction is None) == (self.input is None):
            yield (
                InvalidField((), "`instruction` is missing: add it")
                if self.instruction is None
                else InvalidField(("input",), "`input` is an alias of `instruction`: remove one of them")
            )
        for number, message in enumerate(self.history):
            yield from _find_message_errors(message, ("history", number))
        for name in self.sampling:
            if name not in _RUN_SAMPLING:
                yield InvalidField(
                    ("sampling", name[:64]), f"`{name[:64]}` is not a sampling field: use {', '.join(_RUN_SAMPLING)}"
                )
        yield from super().find_errors()

    def to_work(self) -> RunBody:
        """Return the run."""
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

    def find_errors(self) -> Iterator[InvalidField]:
        """Yield each field that cannot be accepted."""
        yield from self._find_unsupported()
        invalid = [
            error
            for number, message in enumerate(self.messages)
            for error in _find_message_errors(message, ("messages", number))
        ]
        yield from invalid
        last = len(self.messages) - 1
        if any(error.path[:2] == ("messages", last) for error in invalid):
            return
        if self.messages[-1]["role"] != "user":
            yield InvalidField(
                ("messages", last), "the last message does not have the role `user`: end with a message of the user"
            )
        else:
            yield from _find_instruction_errors(self.messages[-1], last)

    def to_work(self) -> RunBody:
        """Return the run."""
        sampling = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        return RunBody(
            instruction="\n".join(_texts(self.messages[-1])),
            history=tuple(self.messages[:-1]),
            model=self.model,
            tools=(),
            limits=_ONE_STEP,
            sampling=sampling,
        )

    def _find_unsupported(self) -> Iterator[InvalidField]:
        """Yield each field that asks for something that a row cannot contain."""
        if self.n not in (None, 1):
            yield InvalidField(("n",), "a row contains one answer: remove `n`, and write a line for each answer")
        if self.stream:
            yield InvalidField(("stream",), "a row contains the complete answer: remove `stream`")
        if self.logprobs:
            yield InvalidField(("logprobs",), "rows contain no log probabilities: remove `logprobs`")
        if self.store:
            yield InvalidField(("store",), "answers are not stored at the endpoint: remove `store`")
        if self.tools or self.tool_choice not in (None, "none", "auto"):
            yield InvalidField(
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


def build_item(line: int, custom_id: Any, url: str, fields: Fields) -> BatchItem:
    """Return the item of a line whose fields have no errors. Raises ValidationError: the custom_id is invalid."""
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
    return pick_fields(RunLimits, fields) if fields.model_fields_set else _NO_LIMITS


def _find_message_errors(message: dict[str, Json], path: tuple[str | int, ...]) -> Iterator[InvalidField]:
    """Yield an error if the message has an invalid role or content."""
    role, content = message.get("role"), message.get("content")
    if role not in _Roles.__args__:  # type: ignore[attr-defined]
        roles = ", ".join(_Roles.__args__)  # type: ignore[attr-defined]
        yield InvalidField((*path, "role"), f"the role is missing or unknown: use one of {roles}")
    has_calls = role == "assistant" and bool(message.get("tool_calls"))
    if not isinstance(content, str | list) and not (content is None and has_calls):
        yield InvalidField((*path, "content"), "the content is neither text nor a list of parts: write one of them")


def _find_instruction_errors(message: dict[str, Json], number: int) -> Iterator[InvalidField]:
    """Yield an error if the last message contains anything other than text, or no text."""
    for part_number, text in enumerate(_texts(message)):
        if not isinstance(text, str):
            yield InvalidField(
                ("messages", number, "content", part_number),
                "the last message may contain only text: put files into the workspace of a run",
            )
            return
    if not any(re.search(r"\S", text) for text in _texts(message)):
        yield InvalidField(
            ("messages", number, "content"), "the last message is empty: add the text that the model answers"
        )


def _texts(message: dict[str, Json]) -> list[Any]:
    """Return the texts of a message's parts; None for a part that is not text."""
    content = message.get("content")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return [
        part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        for part in (parts if isinstance(parts, list) else [])
    ]
