"""The first page: running work, waiting approvals, and the load of the hosts."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request, Response

from toolcrew.contract.run_views import DurableRunState
from toolcrew.orchestrator.api.pages.batch_pages import order_tenants
from toolcrew.orchestrator.api.pages.people import PageViewer, Person
from toolcrew.orchestrator.api.pages.rendering import render
from toolcrew.orchestrator.api.pages.route import PageRoute, is_fragment
from toolcrew.orchestrator.api.pages.run_pages import newest_runs
from toolcrew.store.overview import OverviewReader
from toolcrew.store.run_events import RunEventStore
from toolcrew.store.run_records import DurableRun

router = APIRouter(route_class=PageRoute, include_in_schema=False)

MAX_RUNS = 20
MAX_TENANTS = 20
MAX_APPROVALS = 100
_LIVE = (DurableRunState.WAITING_FOR_APPROVAL, DurableRunState.RUNNING)


@router.get("/")
async def overview(request: Request, person: PageViewer) -> Response:
    """Show an overview of the deployment, or of one tenant."""
    parts, viewer = person.app_state.parts, await person.viewer()
    snapshot = await OverviewReader(parts.pool.redis, person.app_state.settings.deployment, parts.pool.keys).read()
    mine = [tenant for tenant in snapshot.tenants if viewer.tenant in (None, tenant.tenant)]
    names = [viewer.tenant] if viewer.tenant else order_tenants(snapshot)[:MAX_TENANTS]
    runs = [run for state in _LIVE for run in await newest_runs(person, names, state, MAX_RUNS)][:MAX_RUNS]
    does = await asyncio.gather(*(_describe_activity(person, run) for run in runs))
    pending = await parts.approvals.pending(person.actor, viewer.tenant, None, MAX_APPROVALS)
    count = f"{len(pending.questions)}{' or more' if pending.cursor else ''}"
    values: dict[str, Any] = {
        "snapshot": snapshot,
        "tenants": mine[:1] if viewer.tenant else [],
        "live": list(zip(runs, does, strict=True)),
        "batches": [batch for batch in snapshot.batches if viewer.tenant in (None, batch.tenant)],
        "approvals": count,
        "seen": len(names),
        "unseen": max(0, len(mine) - len(names)),
    }
    template = "overview.part.html" if is_fragment(request) else "overview.html"
    return render(
        template, viewer, title="Overview", page="", deployment=person.app_state.settings.deployment, **values
    )


async def _describe_activity(person: Person, run: DurableRun) -> str:
    """Return what a run does now, from its last event, in a few words."""
    events = RunEventStore(person.app_state.parts.pool.redis, person.app_state.settings.deployment)
    text = await events.last(run.tenant, run.id)
    event = json.loads(text) if text else {}
    match event.get("type"):
        case "CallStarted" | "CallSent":
            return f"calls {_tool(event)}"
        case "ApprovalAsked":
            return f"{_tool(event)} waits for approval"
        case "OutputArrived":
            return "a tool is printing"
        case "StepStarted":
            return f"step {event['step']}"
        case "StepFinished" | "ModelAnswered":
            return f"step {event['step']}, reply read"
        case "CallFinished":
            return f"{_tool(event)} has ended"
        case "TextArrived":
            return "the model is writing"
        case _:
            return ""


def _tool(event: Mapping[str, Any]) -> str:
    """Return the name of the called tool. An event that was too large to store has no name."""
    named = event.get("call") or event.get("result") or {}
    return str(named.get("name", "a tool"))
