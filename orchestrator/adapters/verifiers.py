"""Taskset and harness of verifiers: agents work in sessions of a pool, and graders in new sessions give the rewards
(docs/integrations.md).

The agent's loop runs in this process. It sends every request of the model to verifiers, which records it and forwards
it. A reward comes only from a grader that has ended (orchestrator/runs/grading.py): every failure of the infrastructure
is an error of the rollout, which then has no reward.
"""

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import verifiers.v1 as vf
from pydantic import Field
from typing_extensions import override

from toolcrew.contract.calls import pick_fields
from toolcrew.contract.errors import ConfigError, ModelUnavailable, OperatorError, ToolFailure
from toolcrew.contract.file_ids import is_stored
from toolcrew.contract.run_events import CallFinished, Failure, FailureKind, Grade, RunEvent
from toolcrew.contract.run_spec import RunBody
from toolcrew.contract.session_spec import SessionSpec
from toolcrew.contract.settings import load_settings
from toolcrew.orchestrator.batches.lines import load_lines
from toolcrew.orchestrator.dialects.profiles import STANDARD
from toolcrew.orchestrator.loop.limits import ReActOptions
from toolcrew.orchestrator.models.choice import ChosenModel
from toolcrew.orchestrator.models.openai import OpenAIModel
from toolcrew.orchestrator.runs.grading import (
    GradingResult,
    Submission,
    grade_submission,
    is_gradable,
    list_start_files,
    retry_grading,
    take_submission,
)
from toolcrew.orchestrator.runs.outcomes import judge_call, judge_error, judge_run
from toolcrew.orchestrator.sdk.client import ToolClient
from toolcrew.orchestrator.sessions.session import Session
from toolcrew.store.batches import BatchItem, Grader

__all__ = ["ToolcrewEnv", "ToolcrewHarness", "ToolcrewTaskset"]


class ToolcrewTasksetConfig(vf.TasksetConfig):  # type: ignore[misc]
    """Options of the taskset. `file`: batch lines (docs/batches.md) with an instruction and a grader. `tenant` None:
    the default tenant.
    """

    file: Path | None = None
    tenant: str | None = None


class ToolcrewTaskData(vf.TaskData):  # type: ignore[misc]
    """Data of a task: one line of the batch file."""

    item: BatchItem
    tenant: str | None = None


class ToolcrewState(vf.State):  # type: ignore[misc]
    """State of one rollout. `submission`: the files for the grader, which are not part of the trace."""

    submission: Submission | None = Field(default=None, exclude=True)
    grade: Grade | None = None


class ToolcrewTask(vf.Task[ToolcrewTaskData, ToolcrewState]):  # type: ignore[misc]
    """A task that is graded by the grader of its batch line."""

    async def finalize(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        """Grade the files of the agent. Raises SandboxError: the infrastructure failed. Raises TaskError: the agent's
        files were not copied, or the grader failed.
        """
        submission = trace.state.submission
        if submission is None:
            raise vf.TaskError(
                "the files of the agent were not copied from its sandbox, because another harness ran the task or a "
                "timeout of verifiers ended it: use ToolcrewHarness, and set limits.max_wall_s in the line instead"
            )
        if submission.refusal:
            trace.state.grade = Grade(reward=0.0, refusal=submission.refusal)
            return
        grader = _grader_of(self.data.item)

        async def grade() -> GradingResult:
            began = time.monotonic()
            async with (
                ToolClient.connect(tenant=self.data.tenant) as client,
                await client.open_session(
                    grader.files, image=grader.image, network="none", options=grader.options
                ) as session,
            ):
                return await grade_submission(session, grader, submission, began)

        with _rollout_errors():
            graded = await retry_grading(self.data.tenant, grade)
        if graded.grade is None:
            raise vf.TaskError(f"{graded.failure.message if graded.failure else ''}: {graded.output}")
        trace.state.grade = graded.grade

    @vf.reward(weight=1.0)  # type: ignore[untyped-decorator]
    async def graded(self, trace: vf.Trace) -> float:
        return float(trace.state.grade.reward)

    @vf.metric  # type: ignore[untyped-decorator]
    async def scores(self, trace: vf.Trace) -> Mapping[str, float]:
        """Return the numbers that the grader reported in addition to the reward."""
        return dict(trace.state.grade.scores)


class ToolcrewTaskset(vf.Taskset[ToolcrewTask, ToolcrewTasksetConfig]):  # type: ignore[misc]
    """Taskset whose tasks are the lines of a batch file."""

    @override
    def load(self) -> Iterable[ToolcrewTask]:
        """Yield a task for each line. Raises BadBatch: the file has errors. Raises ConfigError: a line cannot be a
        task.
        """
        if self.config.file is None:
            raise ConfigError("no file of tasks: set --env.taskset.file")
        for item in load_lines(self.config.file).items:
            data = ToolcrewTaskData(
                id=item.custom_id,
                name=item.custom_id,
                prompt=_instruction_of(item),
                item=item,
                tenant=self.config.tenant,
            )
            yield ToolcrewTask(data, self.config.task)


class ToolcrewEnvConfig(vf.SingleAgentEnvConfig):  # type: ignore[misc]
    """Configuration of the environment. The agent loop runs in this process, so verifiers' own sandboxes and its tunnel
    are not used.
    """

    agent: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())


class ToolcrewEnv(vf.SingleAgentEnv, vf.Env[ToolcrewEnvConfig]):  # type: ignore[misc]
    """Environment of verifiers with one agent."""


class ToolcrewHarness(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc]
    """toolcrew's loop, whose tools run in a new session for each rollout."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    @override
    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: ToolcrewTaskData,
    ) -> vf.ProgramResult:
        """Run the agent, then copy its files for the grader. Raises SandboxError when the infrastructure fails."""
        environment, grader = data.item.environment, _grader_of(data.item)
        model = OpenAIModel(ctx.model, endpoint, secret, load_settings().model_timeout_s)
        try:
            with _rollout_errors():
                async with (
                    ToolClient.connect(tenant=data.tenant) as client,
                    await client.open_session_from(pick_fields(SessionSpec, environment)) as session,
                ):
                    await list_start_files(session, grader)
                    await self._run(client, session, model, trace, data)
                    trace.state.submission = await take_submission(session, grader)
        finally:
            await model.aclose()
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")

    async def _run(
        self, client: ToolClient, session: Session, model: OpenAIModel, trace: vf.Trace, data: ToolcrewTaskData
    ) -> None:
        """Run the agent to its answer or to a limit. Raises SandboxError when the infrastructure failed a call."""
        work = data.item.work
        assert isinstance(work, RunBody)
        failures = list[Failure]()

        def on_event(event: RunEvent) -> None:
            if isinstance(event, CallFinished) and (failure := judge_call(event.result)) is not None:
                failures.append(failure)

        try:
            result = await client.run(
                self.resolve_text_prompt(data)[1] or "",
                session=session,
                model=ChosenModel(model, STANDARD),
                dialect=work.dialect,
                profile=work.profile,
                options=ReActOptions(**work.limits.model_dump(exclude_none=True)),
                tools=work.tools,
                on_event=on_event,
                shows_output=False,
            )
        except ModelUnavailable as error:
            # If verifiers has reached one of its limits, it refuses the next request. The work until then is graded.
            if trace.stop_condition is None and not is_gradable(judge_error(error)):
                raise
        else:
            if (failure := judge_run(result)) is not None:
                failures.append(failure)
        for failure in failures:
            if failure.kind is FailureKind.INFRASTRUCTURE:
                raise vf.SandboxError(f"{failure.code}: {failure.message}")


@contextmanager
def _rollout_errors() -> Iterator[None]:
    """Context manager that converts toolcrew's errors to errors of verifiers."""
    try:
        yield
    except ModelUnavailable:
        # verifiers sent the request itself, and has already recorded its error.
        raise
    except (OperatorError, ToolFailure) as error:
        is_ours = judge_error(error).kind is FailureKind.INFRASTRUCTURE
        raise (vf.SandboxError if is_ours else vf.TaskError)(str(error)) from error


def _grader_of(item: BatchItem) -> Grader:
    assert item.grader is not None
    return item.grader


def _instruction_of(item: BatchItem) -> str:
    """Return the instruction of a line. Raises ConfigError for a line that cannot be a task."""
    if not isinstance(item.work, RunBody) or item.work.history or item.grader is None:
        raise ConfigError(f"{item.custom_id} cannot be a task: write a line with an instruction and a grader")
    if any(map(is_stored, item.sources)):
        raise ConfigError(f"{item.custom_id} uses a file of the store: use a path of this machine")
    if item.environment.session is not None or item.environment.fork is not None:
        raise ConfigError(f"{item.custom_id} uses an open session: use a workspace")
    return item.work.instruction
