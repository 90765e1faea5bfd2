"""Queues, task names and Redis keys that both sides read."""

POOL_SANDBOX = "pool.sandbox"
"""Any sandbox host: where sessions are opened."""


def host_queue(host: str, boot: str) -> str:
    """The queue of one incarnation of a host: a rebooted host never eats calls meant for sandboxes it no longer has."""
    return f"host.{host}.{boot}"


def task_name(tool: str) -> str:
    """One Celery task name per tool, so that Flower's charts are per tool. Session verbs keep their own name."""
    return tool if tool.startswith("session.") else f"tool.{tool}"


def catalog_key(deployment: str) -> str:
    return f"toolcrew:{deployment}:catalog"


def run_marker_key(deployment: str, tenant: str, call_id: str) -> str:
    """Set once when a call starts to run: who finds it there does not run the call again."""
    return f"toolcrew:{deployment}:{tenant}:call:{call_id}:run"


def blob_key(deployment: str, tenant: str, name: str) -> str:
    """Bytes too large or too raw for an envelope; they expire by themselves."""
    return f"toolcrew:{deployment}:{tenant}:blob:{name}"


def is_blob_of(key: str, deployment: str, tenant: str) -> bool:
    """True when `key` is a blob key of that tenant: a key from the queue is never read on trust."""
    return key.startswith(blob_key(deployment, tenant, ""))


def result_channel_pattern(hub: str) -> str:
    """The one pub/sub pattern on which a hub hears its results."""
    return f"celery-task-meta-{hub}-*"


def result_key(task_id: str) -> str:
    return f"celery-task-meta-{task_id}"


def control_queue(queue: str) -> str:
    """The list a host's worker reads at once, however busy its pool is: cancels and closes."""
    return f"{queue}.control"
