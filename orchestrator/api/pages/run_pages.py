"""The pages of runs: the list, and one run with live updates."""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, contextmanager
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request, Response

from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.run_views import DurableRunState
from toolcrew.contract.traceparent import trace_id_of
from toolcrew.orchestrator.api.pages.batch_pages import list_tenants
from toolcrew.orchestrator.api.pages.operating import DONE, back
from toolcrew.orchestrator.api.pages.people import FormSender, PageViewer, Person, build_not_found
from toolcrew.orchestrator.api.pages.rendering import Viewer, build, render
from toolcrew.orchestrator.api.pages.route import PageRoute, is_fragment
from toolcrew.orchestrator.api.pages.run_progress import RunProgress
from toolcrew.orchestrator.api.sse import EventStream, ServerEvent
from toolcrew.orchestrator.runs.durable_runs import DurableRuns
from toolcrew.store.run_events import START, is_before
from toolcrew.store.run_records import DurableRun

router = APIRouter(route_class=PageRoute, include_in_schema=False)

PAGE = 50
MAX_TENANTS = 20
"""Limit of tenants on one page of runs. To see older runs, the person selects a tenant."""
UPDATE_DELAY_S = 0.3
"""Time in seconds to collect changes before a page update. Faster updates would not be readable."""
LOGIN_CHECK_S = 10.0
"""Interval in seconds at which a stream checks that its login is still valid."""
_EVENT_ID = re.compile(r"[0-9]{1,20}(-[0-9]{1,20})?")

RunId = Annotated[str, Path(pattern=r"^[A-Za-z0-9_-]{1,64}$")]


@router.get("/runs")
async def runs(request: Request, person: PageViewer, state: str = "", cursor: str = "") -> Response:
    """Show the runs, the newest first."""
    viewer = await person.viewer()
    selected = next((member for member in DurableRunState if member.value == state), None)
    listed: list[DurableRun] = []
    following, unseen = None, 0
    if viewer.tenant is not None:
        page = await _get_runs(person).list(viewer.tenant, cursor=cursor or None, limit=PAGE, state=selected)
        listed, following = list(page.runs), page.next_cursor
    else:
        names = await list_tenants(person)
        unseen = max(0, len(names) - MAX_TENANTS)
        listed = await newest_runs(person, names[:MAX_TENANTS], selected)
    state_name = selected.value if selected is not None else ""
    values: dict[str, Any] = {
        "runs": listed,
        "state": state_name,
        "states": [member.value for member in DurableRunState],
        "next": following,
        "cursor": cursor,
        "unseen": unseen,
    }
    template = "runs.part.html" if is_fragment(request) else "runs.html"
    return render(template, viewer, title="Runs", page="runs", **values)


@router.get("/runs/{run}")
async def one_run(request: Request, run: RunId, person: PageViewer, done: str = "") -> Response:
    """Show a run with its steps and calls so far."""
    viewer = await person.viewer()
    with _missing_run_as_404():
        durable_run = await _get_runs(person).get(person.owner, run)
        tree = await _get_runs(person).tree(person.owner, durable_run)
    trace = find_trace(person, run)
    if is_fragment(request):
        return render("run.part.html", viewer, run=durable_run, tree=tree, trace=trace)
    progress, last = RunProgress(), ""
    with _missing_run_as_404():
        last = await _read_so_far(person, run, progress)
    values: dict[str, Any] = {"run": durable_run, "tree": tree, "progress": progress, "last": last, "trace": trace}
    values["done"] = DONE.get(done)
    return await person.render("run.html", title=f"Run {run}", page="runs", **values)


@router.get("/runs/{run}/transcript")
async def transcript(run: RunId, person: PageViewer) -> Response:
    """Show the messages of a run, in the form that the model receives."""
    async with AsyncExitStack() as stack:
        with _missing_run_as_404():
            holding = _get_runs(person).hold_transcript(person.owner, run)
            messages, _ = await stack.enter_async_context(holding)
        return await person.render(
            "transcript.html",
            title=f"Transcript of run {run}",
            page="runs",
            run=run,
            of=person.owner,
            messages=messages,
        )


@router.get("/runs/{run}/stream")
async def stream(request: Request, run: RunId, person: PageViewer, after: str = "") -> Response:
    """Stream the changed steps of a run, each rendered as on the page."""
    start = request.headers.get("last-event-id") or after
    if start and not _EVENT_ID.fullmatch(start):
        raise build_not_found("event")
    viewer, progress = await person.viewer(), RunProgress()
    with _missing_run_as_404():
        await _get_runs(person).get(person.owner, run)
        # A change replaces the complete step on the page, so the stream needs all earlier events of the run.
        last = await _read_so_far(person, run, progress, until=start)
    return EventStream(person.event_streams.counted(_parts(person, viewer, run, progress, last)))


@router.post("/runs/{run}/cancel")
async def cancel(run: RunId, person: FormSender) -> Response:
    """Cancel a run."""
    with _missing_run_as_404():
        await _get_runs(person).cancel(person.owner, run, actor=person.actor)
    return back("runs", run, of=person.owner, tenant=person.tenant, done="cancelled")


def find_trace(person: Person, run: str) -> tuple[str, str | None] | None:
    """Return the id of a run's trace and the address of the trace, or None without tracing.

    The address is None when the settings contain no trace address.
    """
    if person.app_state.parts.pool.tracer is None:
        return None
    trace, url = trace_id_of(person.owner, run), person.app_state.settings.trace_url
    return trace, url.replace("{trace_id}", trace) if url else None


async def has_page(person: Person, tenant: str, run: str | None) -> bool:
    """Return whether a run has a page. Items of batches and runs of other programs have no page."""
    try:
        return run is not None and (await _get_runs(person).get(tenant, run)).id == run
    except ToolFailure:
        return False


async def newest_runs(
    person: Person, tenants: list[str], state: DurableRunState | None = None, limit: int = PAGE
) -> list[DurableRun]:
    """Return the newest runs of several tenants, the newest first."""
    pages = await asyncio.gather(*(_get_runs(person).list(tenant, limit=limit, state=state) for tenant in tenants))
    newest = [run for page in pages for run in page.runs]
    return sorted(newest, key=lambda run: -run.created_at)[:limit]


async def _parts(
    person: Person, viewer: Viewer, run: str, progress: RunProgress, last: str
) -> AsyncIterator[ServerEvent]:
    events = _get_runs(person).follow(person.owner, run, last)
    following = asyncio.ensure_future(anext(events, None))
    looked_at = time.monotonic()
    try:
        while True:
            await asyncio.wait((following,))
            until = time.monotonic() + UPDATE_DELAY_S
            while following is not None:
                # `wait` does not cancel `following` at the timeout, so no event is lost between two updates.
                done, _ = await asyncio.wait((following,), timeout=max(0.0, until - time.monotonic()))
                if not done or (entry := following.result()) is None:
                    break
                last = entry[0]
                progress.add(entry[1])
                following = asyncio.ensure_future(anext(events, None))
                if time.monotonic() >= until:
                    break
            if time.monotonic() - looked_at >= LOGIN_CHECK_S:
                looked_at = time.monotonic()
                await person.login.credential.check(person.owner)
            parts = [
                (step.id, build("step.part.html", viewer, step=step, tenant=person.owner))
                for step in progress.take_changed()
            ]
            if parts:
                yield ServerEvent("parts", json.dumps(parts), last)
            if following.done() and following.result() is None:
                yield ServerEvent("end", {"message": "The run has ended."})
                return
    except ToolFailure:
        yield ServerEvent("end", {"message": "You are logged out. Reload the page to log in."})
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        if (close := getattr(events, "aclose", None)) is not None:
            await close()


async def _read_so_far(person: Person, run: str, progress: RunProgress, until: str | None = None) -> str:
    """Add the stored events to the progress, and return the id of the last event.

    Changes up to the event `until` are not reported as changes, because the page shows them already.
    """
    last = START
    async for id_, text in _get_runs(person).stored_events(person.owner, run):
        if until and not is_before(until, last) and is_before(until, id_):
            progress.take_changed()
        progress.add(text)
        last = id_
    if until is None or (until and not is_before(until, last)):
        progress.take_changed()
    return last


def _get_runs(person: Person) -> DurableRuns:
    return person.app_state.parts.runs


@contextmanager
def _missing_run_as_404() -> Iterator[None]:
    try:
        yield
    except ToolFailure as failure:
        if failure.code is not ErrorCode.FILE_NOT_FOUND:
            raise
        raise build_not_found("run") from failure
