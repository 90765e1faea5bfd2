"""`toolcrew approvals`: lists the calls that wait for a decision, with their exact arguments, and decides them."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from contract.approvals import Decision
from contract.clock import format_instant
from contract.errors import ConfigError, ErrorCode, ToolFailure
from orchestrator.approvals.approvers import call_lines, make_visible
from orchestrator.cli.runner import Json, Tenant, open_client, run_work
from orchestrator.settings import load_settings
from store.approvals import MAX_ARGUMENT_BYTES, MAX_PAGE, ApprovalAnswer, ApprovalQueue, PendingQuestion
from store.audit import Actor

approvals_app = typer.Typer(no_args_is_help=True, help="List the calls that wait for a decision, and decide.")

Id = Annotated[str, typer.Argument(metavar="ID", help="The id of the question, as `list` shows it.")]
Reason = Annotated[str, typer.Option("--reason", help="Kept in the audit; the model reads it when the call is denied.")]
Digest = Annotated[
    str | None,
    typer.Option(
        "--digest",
        help="Of the call as you saw it, its beginning is enough: another call of that id is not decided then.",
    ),
]
MIN_DIGEST_CHARS = 8


@asynccontextmanager
async def open_questions() -> AsyncIterator[tuple[ApprovalQueue, Actor]]:
    """The questions of the pool that TOOLCREW_REDIS_URL names, and who asks for them; no worker need be there. Raises
    ConfigError, BrokerUnavailable.
    """
    if load_settings().redis_url is None:
        raise ConfigError("questions wait in the Redis of a pool, and TOOLCREW_REDIS_URL names none: set it")
    async with open_client(needs_workers=False) as client:
        yield client.approvals, await client.actor()


def asks_elsewhere() -> bool:
    """Whether what this command runs waits for answers in the queue. Raises ConfigError where nobody could give one."""
    settings = load_settings()
    if settings.approvals == "queue" and settings.redis_url is None:
        raise ConfigError(
            "TOOLCREW_APPROVALS=queue lets calls wait in the Redis of a pool, and nobody reaches that of a stack of "
            "this command's own: set TOOLCREW_REDIS_URL, or TOOLCREW_APPROVALS=ask"
        )
    return settings.approvals == "queue"


@approvals_app.command("list")
def approvals_list(tenant: Tenant = None, as_json: Json = False) -> None:
    """List the calls that wait, with their exact arguments, in the order in which they expire.

    Of every tenant; with a tenant's key of that tenant.
    """

    async def work() -> list[PendingQuestion]:
        async with open_questions() as (queue, actor):
            page = await queue.pending(actor, tenant, limit=MAX_PAGE)
            found = [*page.questions]
            while page.cursor is not None:
                page = await queue.pending(actor, tenant, page.cursor, MAX_PAGE)
                found += page.questions
            return found

    found = run_work(work(), as_json)
    if as_json:
        typer.echo(json.dumps([pending_json(one) for one in found]))
        return
    for one in found:
        typer.echo("\n".join(pending_lines(one)))
    typer.echo(f"{len(found)} wait" if found else "nothing waits for a decision", err=True)


@approvals_app.command("decide")
def approvals_decide(
    id_: Id,
    decision: Annotated[
        Literal["allow", "deny"],
        typer.Argument(
            help="allow: the call runs, as shown or with --arguments; deny: it fails, and the model goes on."
        ),
    ],
    reason: Reason = "",
    arguments: Annotated[
        str | None,
        typer.Option(
            "--arguments", help="@FILE.json: run it with these arguments instead; they are checked as the model's were."
        ),
    ] = None,
    digest: Digest = None,
    as_json: Json = False,
) -> None:
    """Allow or deny a call."""
    if decision == "deny" and arguments is not None:
        raise typer.BadParameter("--arguments goes with allow")

    async def work() -> ApprovalAnswer:
        return await _decide(id_, Decision(decision == "allow", reason, _read_arguments(arguments)), digest)

    _print_answer(run_work(work(), as_json), as_json)


def pending_json(pending: PendingQuestion) -> dict[str, Any]:
    """For programs: instants in ISO 8601."""
    return pending.to_json() | {
        "created_at": format_instant(pending.created_at),
        "expires_at": format_instant(pending.expires_at),
    }


def pending_lines(pending: PendingQuestion) -> list[str]:
    """A question as a person reads it. The warning stands last, where long arguments cannot push it away."""
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
        # The id is of this one call and its arguments; a digest says it once more.
        is_same = digest is None or (len(digest) >= MIN_DIGEST_CHARS and question.digest.startswith(digest))
        return await queue.decide(id_, decision, digest=question.digest if is_same else "", actor=actor)


def _read_arguments(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    if not text.startswith("@"):
        raise ToolFailure(
            ErrorCode.INVALID_ARGUMENTS,
            "--arguments is @FILE.json: write the arguments into a file, all of them, and name that",
        )
    try:
        with Path(text[1:]).open("rb") as file:
            read = file.read(MAX_ARGUMENT_BYTES + 1)
        found = json.loads(read) if len(read) <= MAX_ARGUMENT_BYTES else None
    except (OSError, ValueError, RecursionError) as error:
        raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, f"the arguments cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise ToolFailure(
            ErrorCode.INVALID_ARGUMENTS, f"the arguments must be one JSON object of at most {MAX_ARGUMENT_BYTES} bytes"
        )
    return found


def _print_answer(answer: ApprovalAnswer, as_json: bool) -> None:
    if as_json:
        told = {
            "id": answer.id,
            "state": "allowed" if answer.is_allowed else "denied",
            "tool": answer.tool,
            "digest": answer.digest,
        }
        typer.echo(json.dumps(told | {"arguments_changed": answer.arguments is not None}))
        return
    how = " with other arguments" if answer.arguments is not None else ""
    typer.echo(make_visible(f"{answer.tool} is {'allowed' if answer.is_allowed else 'refused'}{how}"))
