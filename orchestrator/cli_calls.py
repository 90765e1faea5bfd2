"""`toolcrew calls`: what is known of a call by its id."""

import json
from contextlib import AsyncExitStack
from typing import Annotated, Any

import typer

from contract.clock import format_instant
from contract.errors import ErrorCode, ToolFailure
from contract.ledger import CallRecord
from contract.tenancy import DEFAULT_TENANT
from orchestrator.call_ledger import CallLedger
from orchestrator.cli_runner import Json, run_work
from orchestrator.redis_connection import check_redis, open_redis
from orchestrator.settings import load_settings
from orchestrator.terminal import escape_controls

calls_app = typer.Typer(no_args_is_help=True, help="What is known of calls.")


@calls_app.callback()
def calls() -> None:
    """What is known of calls."""


@calls_app.command("show")
def calls_show(
    call_id: Annotated[str, typer.Argument(help="The call's id, as results, logs and Flower tell it.")],
    tenant: Annotated[str, typer.Option("--tenant", help="Whose call it was.")] = DEFAULT_TENANT,
    as_json: Json = False,
) -> None:
    """Where a call is: its state, attempt, session, and who ran it when. Calls are remembered for a day."""

    async def work() -> CallRecord:
        settings = load_settings()
        async with AsyncExitStack() as stack:
            redis = open_redis(settings.broker())
            stack.push_async_callback(redis.aclose)
            await check_redis(redis, settings.broker())
            record = await CallLedger(redis, settings.deployment).find(tenant, call_id)
        if record is None:
            raise ToolFailure(
                ErrorCode.INVALID_ARGUMENTS,
                f"nothing is known of call {call_id} of tenant {tenant}: look at the id and --tenant; calls are remembered for a day",
            )
        return record

    told = record_json(call_id, tenant, run_work(work(), as_json))
    if as_json:
        typer.echo(json.dumps(told))
        return
    for name, value in told.items():
        if value is not None:
            typer.echo(escape_controls(f"{name:<11}{value}"))


def record_json(call_id: str, tenant: str, record: CallRecord) -> dict[str, Any]:
    """The record for people and programs: times in ISO 8601 UTC, None for what is not known."""
    return {
        "call": call_id,
        "tenant": tenant,
        "tool": record.tool or None,
        "state": record.state.value,
        "error_code": record.code or None,
        "attempt": record.attempt,
        "session": record.session or None,
        "queue": record.queue or None,
        "holder": record.holder or None,
        "sandbox": record.sandbox or None,
        "queued_at": _instant(record.queued_at),
        "started_at": _instant(record.started_at),
        "ended_at": _instant(record.ended_at),
    }


def _instant(at: float) -> str | None:
    return format_instant(at, "milliseconds") if at else None
