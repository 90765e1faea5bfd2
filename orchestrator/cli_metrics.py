"""`toolcrew metrics`: the page that Prometheus scrapes, on stdout."""

import json
from typing import Annotated

import typer

from orchestrator.cli_runner import Json, run_work
from orchestrator.metrics.page import render_metrics
from orchestrator.redis_connection import check_redis, open_redis
from orchestrator.settings import load_settings


def metrics_print(
    is_open: Annotated[bool, typer.Option("--openmetrics", help="As OpenMetrics and not in Prometheus's own format.")] = False,
    as_json: Json = False,
) -> None:
    """All metrics of the deployment as of now (docs/metrics.md), as GET /metrics of the API gives them."""

    async def work() -> bytes:
        settings = load_settings()
        broker = settings.broker()
        client = open_redis(broker)
        try:
            await check_redis(client, broker)
            return await render_metrics(client, broker.deployment, has_tenants=settings.metrics_tenants, is_open=is_open)
        finally:
            await client.aclose()

    text = run_work(work(), as_json).decode()
    typer.echo(json.dumps({"metrics": text}) if as_json else text, nl=as_json)
