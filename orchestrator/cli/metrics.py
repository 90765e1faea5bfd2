"""`toolcrew metrics`: the page that Prometheus scrapes, on stdout."""

import json
from typing import Annotated

import typer

from orchestrator.cli.access import open_deployment
from orchestrator.cli.runner import Json, run_work
from orchestrator.metrics.page import render_metrics
from orchestrator.settings import load_settings


def metrics_print(
    is_open: Annotated[
        bool, typer.Option("--openmetrics", help="As OpenMetrics and not in Prometheus's own format.")
    ] = False,
    as_json: Json = False,
) -> None:
    """All metrics of the deployment as of now (docs/metrics.md), as GET /metrics of the API gives them."""

    async def work() -> bytes:
        has_tenants = load_settings().metrics_tenants
        async with open_deployment("operator") as deployment:
            return await render_metrics(
                deployment.redis, deployment.broker.deployment, has_tenants=has_tenants, is_open=is_open
            )

    text = run_work(work(), as_json).decode()
    typer.echo(json.dumps({"metrics": text}) if as_json else text, nl=as_json)
