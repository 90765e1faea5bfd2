"""The audit log over HTTP, for operators: all changes with their actors."""

from typing import Annotated

from fastapi import APIRouter, Query

from toolcrew.contract.access_views import Page
from toolcrew.orchestrator.api.access import OperatorCaller
from toolcrew.orchestrator.api.paging import Cursor, Limit, decode_cursor, encode_cursor
from toolcrew.orchestrator.api.problem_handlers import responses
from toolcrew.store.audit import Audit, AuditAction, AuditEntry

router = APIRouter(prefix="/v1/audit", tags=["audit"], responses=responses())


@router.get("")
async def read_audit(
    caller: OperatorCaller,
    cursor: Cursor = None,
    limit: Limit = 50,
    action: Annotated[list[AuditAction] | None, Query(description="Only these.")] = None,
    about: Annotated[
        str | None, Query(pattern=r"^[A-Za-z0-9_-]{1,64}$", description="Only changes that concern this tenant.")
    ] = None,
    target: Annotated[str | None, Query(max_length=256, description="Only changes of this object.")] = None,
) -> Page[AuditEntry]:
    """List the changes, the newest first. A page may be shorter than `limit` and not be the last:
    check `next_cursor`.
    """
    app_state = caller.app_state
    audit = Audit(app_state.parts.pool.redis, app_state.settings.deployment)
    page = await audit.read(decode_cursor(cursor), limit, tenant=about, actions=tuple(action or ()), target=target)
    return Page(data=list(page.entries), next_cursor=encode_cursor(page.cursor) if page.cursor else None)
