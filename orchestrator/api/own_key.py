"""The API key of a request, so that a program can find out which tenant it acts for."""

from fastapi import APIRouter

from toolcrew.contract.access_views import KeyView
from toolcrew.contract.errors import ErrorCode
from toolcrew.orchestrator.api.access import AnyCaller
from toolcrew.orchestrator.api.problem_handlers import responses
from toolcrew.orchestrator.http.problems import ApiProblem
from toolcrew.orchestrator.operations.views import view_key

router = APIRouter(prefix="/v1/key", tags=["tenants"], responses=responses())


@router.get("")
async def get_own_key(caller: AnyCaller) -> KeyView:
    """Return the API key of this request: its tenant, its role and its end, without its text."""
    key = await caller.app_state.parts.keys.find(caller.identity.key_id)
    if key is None:
        raise ApiProblem(ErrorCode.UNAUTHENTICATED, "the API key was revoked: use another key")
    return view_key(caller.identity.key_id, key)
