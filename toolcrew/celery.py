"""toolcrew in Celery applications.

Offer the tasks of an application as tools of an agent:

    from toolcrew import LocalTools
    from toolcrew.celery import tools_from

    tools = LocalTools(tools_from(app, ["shop.tasks.*"]))

Use the pool from tasks, chains and chords. The worker needs TOOLCREW_URL and TOOLCREW_API_KEY:

    app = Celery("shop", include=["toolcrew.celery"])
    chord(run_agent.s(f"Summarize {page}") for page in pages)(collect.s())

`celery -A toolcrew.celery inspect active` asks the workers of the pool. It needs TOOLCREW_REDIS_URL.
"""

from typing import TYPE_CHECKING, Any

from toolcrew.orchestrator.adapters.celery_tasks import PoolError, call_tool, run_agent, submit_batch
from toolcrew.orchestrator.adapters.celery_tools import tools_from

if TYPE_CHECKING:
    from celery import Celery

    app: Celery

__all__ = ["PoolError", "app", "call_tool", "run_agent", "submit_batch", "tools_from"]


def __getattr__(name: str) -> Any:
    """Return `app`, the Celery application of the pool, for Celery's own commands. Only they need its settings."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from toolcrew.contract.settings import load_settings
    from toolcrew.orchestrator.operations.pool_commands import open_command_app

    return open_command_app(load_settings().broker(), "toolcrew")
