"""The pages of batches: the list, one batch with its plots, and its items."""

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request, Response
from markupsafe import Markup

from toolcrew.concurrency.read_memory import PARSED_LOG, READ_BYTES, read_memory
from toolcrew.concurrency.tenant_threads import in_tenant_thread
from toolcrew.contract.errors import ToolFailure
from toolcrew.orchestrator.api.pages.operating import DONE, back
from toolcrew.orchestrator.api.pages.people import FormSender, PageViewer, Person, build_not_found
from toolcrew.orchestrator.api.pages.rendering import render
from toolcrew.orchestrator.api.pages.route import PageRoute, is_fragment
from toolcrew.orchestrator.batches.report import build_sections
from toolcrew.orchestrator.runs.client_batches import ClientBatches
from toolcrew.orchestrator.runs.durable_runs import build_transcript
from toolcrew.store.audit import Audit, build_entry
from toolcrew.store.batch_store import PAGE_BYTES
from toolcrew.store.batches import BatchRecord, BatchState
from toolcrew.store.overview import Overview, OverviewReader
from toolcrew.store.run_events import MAX_PROGRESS_BYTES
from toolcrew.store.run_records import RunRecord

router = APIRouter(route_class=PageRoute, include_in_schema=False)

_ONE_REPORT = asyncio.Lock()
"""Limits the process to one report at a time, because the report of a large batch takes some seconds and tens of MB."""
MOST = 200
MAX_TENANTS = 50
"""Limit of tenants on one page of batches. With more tenants, the person selects one."""

ITEMS_PAGE = 50
MAX_ITEMS_READ = 2000
"""Limit of items that one request for failed items reads."""

BatchId = Annotated[str, Path(pattern=r"^[A-Za-z0-9_-]{1,64}$")]


@router.get("/batches")
async def batches(person: PageViewer) -> Response:
    """Show the batches of the last 30 days."""
    viewer = await person.viewer()
    names = [viewer.tenant] if viewer.tenant else await list_tenants(person)
    rows: list[tuple[str, str, BatchRecord]] = []
    older = 0
    for name in names[:MAX_TENANTS]:
        page = await _runs(person).queue.batches.list_batches(name, limit=MOST)
        rows += [(name, batch, record) for batch, record in page.batches.items()]
        older += page.older
    rows.sort(key=lambda row: -row[2].created_at)
    unseen = max(0, len(names) - MAX_TENANTS)
    return render(
        "batches.html",
        viewer,
        title="Batches",
        page="batches",
        batches=rows[:MOST],
        left=older + max(0, len(rows) - MOST),
        unseen=unseen,
    )


@router.get("/batches/{batch}")
async def one_batch(request: Request, batch: BatchId, person: PageViewer, done: str = "") -> Response:
    """Show the state of a batch and its report so far."""
    runs = _runs(person)
    record = await _find_batch(runs, batch)
    is_live = record.state in (BatchState.IN_PROGRESS, BatchState.CANCELLING)
    counts = {"waiting": 0, "running": 0, **await runs.queue.batches.counts(person.owner, batch)}
    values: dict[str, Any] = {
        "batch": batch,
        "of": person.owner,
        "record": record,
        "counts": counts,
        "is_live": is_live,
    }
    if is_fragment(request):
        return render("batch.part.html", await person.viewer(), **values)
    async with read_memory().reserve(person.owner, MAX_PROGRESS_BYTES * PARSED_LOG), _ONE_REPORT:
        batch_events = await runs.batch_events(batch)
        sections = await in_tenant_thread(
            runs.tenant, build_sections, batch_events, batch=batch, tenant=runs.tenant, total=record.total
        )
    shown = [(section.id, section.heading, Markup(section.to_html())) for section in sections]
    return render(
        "batch.html",
        await person.viewer(),
        title=f"Batch {batch}",
        page="batches",
        sections=shown,
        done=DONE.get(done),
        **values,
    )


@router.get("/batches/{batch}/items")
async def batch_items(
    batch: BatchId, person: PageViewer, first: Annotated[int, Query(ge=0, le=10_000_000)] = 0, only: str = ""
) -> Response:
    """Show the items of a batch in the order of its file, or only failed items."""
    runs = _runs(person)
    record = await _find_batch(runs, batch)
    only_failed = only == "failed"
    items: list[tuple[str, RunRecord | None]] = []
    following, total = first, 0
    # Only a few of many items may have failed, so a request reads a limited number of items.
    while following < min(record.total, first + MAX_ITEMS_READ) and len(items) < ITEMS_PAGE:
        last = following + ITEMS_PAGE - len(items) - 1
        names = await runs.queue.batches.items(person.owner, batch, following, last)
        count, size = await runs.queue.batches.fit_page(person.owner, names)
        if not count:
            # These items are not queued yet.
            following = last + 1
            continue
        if items and (total := total + size) > PAGE_BYTES:
            break
        async with read_memory().reserve(person.owner, min(size * PARSED_LOG, READ_BYTES // 2)):
            records = await runs.queue.records([(person.owner, name) for name in names[:count]])
        items += [item for item in zip(names, records, strict=False) if not only_failed or _has_failed(item[1])]
        following += count
    values: dict[str, Any] = {
        "batch": batch,
        "of": person.owner,
        "items": items,
        "only": "failed" if only_failed else "",
        "first": first,
        "following": following if following < record.total else None,
    }
    return await person.render("batch_items.html", title=f"Items of batch {batch}", page="batches", **values)


@router.get("/batches/{batch}/items/{run}")
async def batch_item(batch: BatchId, run: BatchId, person: PageViewer) -> Response:
    """Show one item: its outcome and its messages."""
    runs = _runs(person)
    await _find_batch(runs, batch)
    size = PARSED_LOG * await runs.queue.runs.log_bytes(person.owner, run)
    async with read_memory().reserve(person.owner, size):
        return await _show_item(person, runs, batch, run)


async def _show_item(person: Person, runs: ClientBatches, batch: str, run: str) -> Response:
    try:
        record, entries = await runs.queue.runs.read_log(person.owner, run, batch)
    except ToolFailure as error:
        raise build_not_found("item") from error
    values: dict[str, Any] = {
        "batch": batch,
        "of": person.owner,
        "run": run,
        "record": record,
        "messages": await in_tenant_thread(person.owner, build_transcript, run, record, entries),
        "has_log": bool(entries),
    }
    return await person.render("batch_item.html", title=f"Item {record.item.custom_id}", page="batches", **values)


@router.post("/batches/{batch}/cancel")
async def cancel_batch(batch: BatchId, person: FormSender) -> Response:
    """Cancel a batch: start no further items and end the running items."""
    runs = _runs(person)
    await _find_batch(runs, batch)
    if person.is_operator:
        # A tenant's own cancellation needs no audit entry.
        audit = Audit(person.app_state.parts.pool.redis, person.app_state.settings.deployment)
        await audit.add(build_entry(person.actor, "batch.cancel", batch, tenant=person.owner))
    await runs.batches.cancel(batch)
    return back("batches", batch, of=person.owner, tenant=person.tenant, done="cancelled")


async def list_tenants(person: Person) -> list[str]:
    """Return all tenants. The tenants with the most work are first."""
    parts = person.app_state.parts
    overview = await OverviewReader(parts.pool.redis, person.app_state.settings.deployment, parts.pool.keys).read()
    return list(dict.fromkeys([*order_tenants(overview), person.owner]))


def order_tenants(overview: Overview) -> list[str]:
    """Return all tenants of an overview: first those that execute runs or items, then those with the most calls."""
    busiest = sorted(overview.batches, key=lambda batch: not batch.running)
    named = [tenant.tenant for tenant in overview.tenants]
    return list(dict.fromkeys([*(batch.tenant for batch in busiest), *named]))


def _has_failed(record: RunRecord | None) -> bool:
    return record is not None and record.outcome is not None and record.outcome.failure is not None


def _runs(person: Person) -> ClientBatches:
    return person.client.batch_runs(has_traces=False)


async def _find_batch(runs: ClientBatches, batch: str) -> BatchRecord:
    try:
        return await runs.batches.status(batch)
    except ToolFailure as error:
        raise build_not_found("batch") from error
