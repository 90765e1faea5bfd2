"""Checkpoints over HTTP: delete a stored one. Sessions make them (api/sessions.py)."""

from typing import Annotated

from fastapi import APIRouter, Path

from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.session_spec import CHECKPOINT_PATTERN
from toolcrew.orchestrator.api.access import AnyCaller
from toolcrew.orchestrator.api.problem_handlers import responses

router = APIRouter(prefix="/v1/checkpoints", tags=["sessions"], responses=responses())


@router.delete("/{checkpoint}", status_code=204, responses=responses(404))
async def delete_checkpoint(checkpoint: Annotated[str, Path(pattern=CHECKPOINT_PATTERN)], caller: AnyCaller) -> None:
    """Delete a checkpoint of the tenant. Sessions that were started from it go on."""
    await caller.record_foreign_action("file.delete", checkpoint)
    if not await caller.client.delete_checkpoint(checkpoint):
        raise ToolFailure(
            ErrorCode.FILE_NOT_FOUND, f"tenant {caller.tenant} has no checkpoint {checkpoint}: it may have been deleted"
        )
