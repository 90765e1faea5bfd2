"""`toolcrew hosts`: list workers, and take hosts out of service."""

from collections.abc import Callable
from typing import Annotated, Any

import typer

from toolcrew.contract.clock import format_instant
from toolcrew.contract.errors import OperatorError
from toolcrew.contract.hosts import RESTART_GRACE_S, HostReport
from toolcrew.contract.plurals import count
from toolcrew.orchestrator.cli.access import open_deployment
from toolcrew.orchestrator.cli.runner import Json, Output, as_command, list_json, list_output
from toolcrew.orchestrator.operations.drains import find_workers, follow_drain, order_drain
from toolcrew.orchestrator.operations.views import view_host
from toolcrew.orchestrator.terminal.output import escape_controls
from toolcrew.store.hosts import HostStore

hosts_app = typer.Typer(no_args_is_help=True)

MIB = 1024 * 1024
Host = Annotated[str, typer.Argument(help="The name that `toolcrew hosts list` shows, or the queue of one worker.")]


@hosts_app.command("list")
@as_command
async def hosts_list(
    host: Annotated[str | None, typer.Argument(help="Only the workers of this host, with all fields.")] = None,
    full: Annotated[bool, typer.Option("--full", help="Show all fields that each worker reports.")] = False,
    as_json: Json = False,
) -> Output:
    """List the workers with their load, their state and the number of waiting calls."""
    async with open_deployment("operator") as deployment:
        reports = await deployment.hosts.read()
        found = reports if host is None else find_workers(reports, host)
        waiting = await deployment.hosts.queued(
            sorted({queue for report in found for queue in (report.queue, *report.pools)})
        )
    rows = [view_host(report, waiting).model_dump(mode="json") for report in found]
    if full or host is not None:
        lines = [
            line
            for row in rows
            for line in (row["queue"], *(f"  {name:<18} {_format_value(row[name])}" for name in row if name != "queue"))
        ]
        return Output(list_json("hosts", rows), lines)
    columns = ("host", "kind", "state", "busy", "sessions", "waiting", "memory-free-mib", "reported-at", "queue")
    shown = [_row(report, sum(row["waiting"].values())) for report, row in zip(found, rows, strict=True)]
    return list_output(
        list_json("hosts", rows), shown, columns, empty="no worker reports: start one (toolcrew serve worker)"
    )


@hosts_app.command("drain")
@as_command
async def hosts_drain(
    host: Host,
    wait: Annotated[bool, typer.Option("--wait", help="Return only when the workers have ended.")] = False,
    lossy: Annotated[
        bool,
        typer.Option(
            "--lossy", help="Drain a host whose checkpoints are stored only on it; its sessions lose their files."
        ),
    ] = False,
    as_json: Json = False,
) -> Output:
    """Take a host out of service.

    Its sessions are saved and continue on other hosts. Then its workers end with exit code 0.
    """

    def print_progress(line: str) -> None:
        if not as_json:
            typer.echo(escape_controls(line), err=True)

    async with open_deployment("operator") as deployment:
        hosts, keys = deployment.hosts, deployment.signing_keys
        found = find_workers(await hosts.read(), host)
        reports = [report for report in found if report.worker]
        if not reports:
            raise OperatorError(
                f"{found[0].queue} has ended, and the pool waits {RESTART_GRACE_S} s for its restart. Start it and "
                "drain it, or wait: then its sessions continue on other hosts"
            )
        for report in reports:
            await order_drain(hosts, report, keys, lossy=lossy, actor=deployment.actor)
            print_progress(f"{report.queue} drains")
        rows = [
            await _follow_drain(hosts, report, print_progress) if wait else _end(report, "draining")
            for report in reports
        ]
    hint = "`toolcrew hosts list` shows the progress; --wait waits until the workers have ended"
    return Output({"host": host, "workers": rows}, [] if wait else [hint])


async def _follow_drain(hosts: HostStore, report: HostReport, print_progress: Callable[[str], None]) -> dict[str, Any]:
    """Wait until a draining worker has ended. Raises OperatorError if it is lost before."""
    async for state, last in follow_drain(hosts, report):
        if state == "lost":
            raise OperatorError(
                f"{report.queue} was lost while it drained: its sessions continue on other hosts from their last "
                "checkpoints"
            )
        if state == "drained":
            print_progress(f"{report.queue} has ended")
        else:
            print_progress(f"{report.queue}: {last.problem or count(last.busy, 'call runs', 'calls run')}")
    return _end(report, "drained")


def _end(report: HostReport, state: str) -> dict[str, Any]:
    return {"queue": report.queue, "kind": report.kind, "state": state}


def _row(report: HostReport, waiting: int) -> dict[str, Any]:
    return {
        "host": report.host,
        "kind": report.kind,
        "state": report.state,
        "busy": f"{report.busy}/{report.slots}",
        "sessions": f"{report.sessions}/{report.max_sessions}" if report.kind == "sandbox" else "-",
        "waiting": waiting,
        "memory-free-mib": report.memory_free_bytes // MIB,
        "reported-at": format_instant(report.reported_at),
        "queue": report.queue,
    }


def _format_value(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}: {inner}" for name, inner in value.items())
    return (", ".join(map(str, value)) if isinstance(value, list) else str(value)) or "-"
