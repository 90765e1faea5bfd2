"""`toolcrew top`: hosts, queues, tenants and batches of a deployment, live or once."""

import json
from typing import Annotated

import typer
from rich.console import Console

from orchestrator.cli.access import open_deployment
from orchestrator.cli.runner import Json, run_work
from orchestrator.cli.terminal_overview import Shown, build_overview_screen
from orchestrator.cli.terminal_top import LiveOverview
from store.overview import Overview, OverviewReader

MOST_ROWS = 1_000_000
"""A page that nobody scrolls by keys is as long as it is."""


def top(
    once: Annotated[bool, typer.Option("--once", help="One look, as text. So it is without a terminal.")] = False,
    as_json: Json = False,
) -> None:
    """What the deployment does: hosts, queues, tenants and batches, the busiest first."""
    console = Console()
    is_live = console.is_terminal and not console.is_dumb_terminal and not once and not as_json

    async def work() -> Overview | None:
        async with open_deployment("operator") as deployment:
            reader = OverviewReader(deployment.redis, deployment.broker.deployment, deployment.signing_keys)
            if is_live:
                await LiveOverview(reader, console).run()
                return None
            return await reader.read()

    seen = run_work(work(), as_json)
    if seen is None:
        return
    if as_json:
        typer.echo(json.dumps(seen.to_json()))
        return
    for line in build_overview_screen(Shown(seen), max(80, console.width), MOST_ROWS, keys=""):
        console.print(line, end="\n", soft_wrap=True)
