"""The audit log over HTTP, for operators: all changes with their actors."""

from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel

from contract.clock import format_instant
from orchestrator.api.access import OperatorCaller
from orchestrator.api.paging import Cursor, Limit, Page, decode_cursor, encode_cursor
from orchestrator.api.problem_handlers import responses
from store.audit import Actor, Audit, AuditAction

router = APIRouter(prefix="/v1/audit", tags=["audit"], responses=responses())


class AuditView(BaseModel):
    """A change. `tenant`: the tenant that the change is about; null: all tenants.

    `target`: the tool, tenant, key, approval, call, host, batch or run.
    """

    id: str
    at: str
    actor: Actor
    action: AuditAction
    tenant: str | None
    target: str
    details: dict[str, str]


@router.get("")
async def read_audit(
    caller: OperatorCaller,
    cursor: Cursor = None,
    limit: Limit = 50,
    action: Annotated[list[AuditAction] | None, Query(description="Only these.")] = None,
    about: Annotated[
        str | None, Query(pattern=r"^[A-Za-z0-9_-]{1,64}$", description="Only changes that concern this tenant.")
    ] = None,
    target: Annotated[str | None, Query(max_length=256)] = None,
) -> Page[AuditView]:
    """List the changes, the newest first. A page may be shorter than `limit` and not be the last:
    check `next_cursor`.
    """
    app_state = caller.app_state
    audit = Audit(app_state.parts.pool.redis, app_state.settings.deployment)
    page = await audit.read(decode_cursor(cursor), limit, tenant=about, actions=tuple(action or ()), target=target)
    views = [
        AuditView.model_validate({**entry.to_json(), "at": format_instant(entry.at, "milliseconds")})
        for entry in page.entries
    ]
    return Page(data=views, next_cursor=encode_cursor(page.cursor) if page.cursor else None)
