"""`toolcrew approvals`: list the calls that wait for a decision, with their exact arguments, and decide them."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from toolcrew.contract.approvals import Decision
from toolcrew.contract.clock import format_instant
from toolcrew.contract.errors import ConfigError, ErrorCode, ToolFailure
from toolcrew.contract.settings import load_settings
from toolcrew.orchestrator.approvals.approvers import call_lines, make_visible
from toolcrew.orchestrator.cli.access import refuse_over_http
from toolcrew.orchestrator.cli.clients import open_client
from toolcrew.orchestrator.cli.runner import Json, OnlyTenant, Output, as_command, list_json
from toolcrew.orchestrator.operations.views import view_approval
from toolcrew.store.approvals import MAX_ARGUMENT_BYTES, MAX_PAGE, ApprovalAnswer, ApprovalQueue, PendingQuestion
from toolcrew.store.audit import Actor

approvals_app = typer.Typer(no_args_is_help=True)

Id = Annotated[str, typer.Argument(metavar="ID", help="The id of the question, as `list` shows it.")]
Reason = Annotated[
    str, typer.Option("--reason", help="The reason. The audit stores it; the model reads it if the call is denied.")
]
Digest = Annotated[
    str | None,
    typer.Option(
        "--digest",
        help="The digest of the call that you saw, or its first 8 characters. The command fails if the call has "
        "another digest.",
    ),
]
MIN_DIGEST_CHARS = 8


@asynccontextmanager
async def open_questions() -> AsyncIterator[tuple[ApprovalQueue, Actor]]:
    """Open the approval queue of the pool that TOOLCREW_REDIS_URL names, and find the actor of this command. No worker
    is needed. Raises ConfigError, BrokerUnavailable.
    """
    refuse_over_http("this command")
    if load_settings().redis_url is None:
        raise ConfigError(
            "TOOLCREW_REDIS_URL is not set. Set it to the Redis of the pool that holds the approval questions"
        )
    async with open_client(needs_workers=False) as client:
        yield client.approvals, await client.actor()


def asks_elsewhere() -> bool:
    """Return whether calls of this command wait for decisions in the queue. Raises ConfigError if no approver could
    reach that queue.
    """
    settings = load_settings()
    if settings.approvals == "queue" and settings.redis_url is None:
        raise ConfigError(
            "TOOLCREW_APPROVALS=queue needs the Redis of a pool, and no approver can reach the embedded stack of this "
            "command: set TOOLCREW_REDIS_URL, or TOOLCREW_APPROVALS=ask"
        )
    return settings.approvals == "queue"


@approvals_app.command("list")
@as_command
async def approvals_list(tenant: OnlyTenant = None, as_json: Json = False) -> Output:
    """List the calls that wait for a decision, with their exact arguments, the first to expire first.

    An operator sees the calls of every tenant. A tenant's key sees only the calls of that tenant.
    """
    async with open_questions() as (queue, actor):
        page = await queue.pending(actor, tenant, limit=MAX_PAGE)
        found = [*page.questions]
        while page.cursor is not None:
            page = await queue.pending(actor, tenant, page.cursor, MAX_PAGE)
            found += page.questions
    lines = [line for question in found for line in pending_lines(question)]
    note = f"{len(found)} wait" if found else "nothing waits for a decision"
    views = [view_approval(question).model_dump(mode="json") for question in found]
    return Output(list_json("approvals", views), lines, [note])


@approvals_app.command("decide")
@as_command
async def approvals_decide(
    id_: Id,
    decision: Annotated[
        Literal["allow", "deny"],
        typer.Argument(
            help="allow: run the call as shown or with --arguments; deny: fail the call, and let the model continue."
        ),
    ],
    reason: Reason = "",
    arguments: Annotated[
        str | None,
        typer.Option(
            "--arguments",
            help="@FILE.json: run the call with these arguments instead. They are checked like the model's arguments.",
        ),
    ] = None,
    digest: Digest = None,
    as_json: Json = False,
) -> Output:
    """Allow or deny a call."""
    if decision == "deny" and arguments is not None:
        raise typer.BadParameter("--arguments needs the decision allow: leave --arguments out to deny the call")
    answer = await _decide(id_, Decision(decision == "allow", reason, _read_arguments(arguments)), digest)
    state, is_changed = "allowed" if answer.is_allowed else "denied", answer.arguments is not None
    fields = {
        "id": answer.id,
        "state": state,
        "tool": answer.tool,
        "digest": answer.digest,
        "arguments_changed": is_changed,
    }
    return Output(fields, [make_visible(f"{answer.tool} is {state}{' with other arguments' if is_changed else ''}")])


def pending_lines(pending: PendingQuestion) -> list[str]:
    """Return the lines that show a question to a person. The warning is last: long arguments cannot scroll the warning
    out of view.
    """
    question = pending.question
    head = f"{question.id}  until {format_instant(pending.expires_at)}  digest {question.digest[:16]}"
    lines = [head, *call_lines(question.call, question.tenant, question.session, question.command)]
    if question.run:
        lines.append(f"run {question.run}, call {question.call.id}")
    if question.reason and not question.warning:
        lines.append(f"asked because {question.reason}")
    if question.warning:
        lines.append(f"WARNING: {question.warning}")
    return [*make_visible("\n".join(lines)).split("\n"), ""]


async def _decide(id_: str, decision: Decision, digest: str | None) -> ApprovalAnswer:
    async with open_questions() as (queue, actor):
        question = (await queue.get(id_, actor)).question
        # The id already names one call with its arguments; the digest confirms what the approver saw.
        is_same = digest is None or (len(digest) >= MIN_DIGEST_CHARS and question.digest.startswith(digest))
        return await queue.decide(id_, decision, digest=question.digest if is_same else "", actor=actor)


def _read_arguments(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    if not text.startswith("@"):
        raise ToolFailure(
            ErrorCode.INVALID_ARGUMENTS,
            "--arguments is not @FILE.json: write all arguments into a file, and give --arguments @FILE.json",
        )
    try:
        with Path(text[1:]).open("rb") as file:
            read = file.read(MAX_ARGUMENT_BYTES + 1)
        found = json.loads(read) if len(read) <= MAX_ARGUMENT_BYTES else None
    except (OSError, ValueError, RecursionError) as error:
        raise ToolFailure(
            ErrorCode.INVALID_ARGUMENTS,
            f"the arguments are not valid JSON ({error}): write one JSON object into the file",
        ) from error
    if not isinstance(found, dict):
        raise ToolFailure(
            ErrorCode.INVALID_ARGUMENTS,
            f"the file is not one JSON object of at most {MAX_ARGUMENT_BYTES} bytes: correct it",
        )
    return found
