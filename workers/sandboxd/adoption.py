"""Sessions that an earlier sandboxd of this name kept: which of them this one can serve, and what they are told."""

import time

import structlog

from workers.sandboxd.records import Records, SessionRecord
from workers.sandboxd.session import KEPT, Session
from workers.sandboxd.traces import Traces
from workers.sandboxd.workspaces.base import Workspaces, WorkspaceSize

log = structlog.get_logger(__name__)


def adopt(records: Records, workspaces: Workspaces) -> list[Session]:
    """Sessions without containers. One whose files are gone is forgotten; one whose files are of another kind waits for a sandboxd that has it."""
    return [entry for record in records.sessions() if (entry := _adopt(record, records, workspaces)) is not None]


def _adopt(record: SessionRecord, records: Records, workspaces: Workspaces) -> Session | None:
    if record.kind != workspaces.kind:
        # An empty workspace of another kind must not pass for the one that was kept.
        log.error("session_of_another_kind", kept=record.kind, here=workspaces.kind, workspace=record.workspace)
        return None
    workspace = workspaces.find(record.workspace, WorkspaceSize(record.plan.workspace_bytes, record.plan.workspace_inodes))
    if workspace is None:
        log.error("workspace_missing", workspace=record.workspace)
        records.forget_session(record.id)
        return None
    entry = Session(
        record.id,
        record.id.partition(":")[0],
        record.plan,
        record.ttl_s,
        workspace,
        None,
        record.generation,
        record.parcel,
        news=record.news,
        untold=record.untold,
        terms=record.terms,
        fence=record.fence,
        # What it did between its record and the end of its sandboxd nobody knows.
        traces=Traces(has_written=record.changed or record.parcel is None),
        automatic_at=record.automatic_at,
    )
    if record.parcel is not None:
        entry.used_at -= max(0.0, time.time() - record.used_at)
    else:  # nobody knows when it was last used before its sandboxd was killed: its time starts anew
        entry.lost = "sandboxd was started anew"
        entry.add_news(KEPT.format(entry.lost))
    return entry
