"""Status of a batch as one object, for `--json`, for the API and for pages."""

from collections.abc import Mapping
from typing import Any

from contract.clock import format_instant
from store.batches import BatchRecord


def build_status(batch: str, record: BatchRecord, counts: Mapping[str, int]) -> dict[str, Any]:
    """Return the status of a batch. Fields have the names of OpenAI's batches if they have the same meaning."""
    failed = {kind.value: count for kind, count in record.failed.items() if count}
    return {
        "id": batch,
        "status": record.state.value,
        "name": record.name or None,
        "request_counts": {
            "total": record.total,
            "completed": record.succeeded,
            "failed": sum(failed.values()),
            **counts,
        },
        "failed": failed,
        "concurrency": record.concurrency,
        "created_at": format_instant(record.created_at),
        "ended_at": format_instant(record.ended_at) if record.ended_at else None,
        "rows": record.rows.model_dump() if record.rows is not None else None,
    }
