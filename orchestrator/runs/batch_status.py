"""Status of a batch, for `--json`, for the API and for webhooks."""

from collections.abc import Mapping

from toolcrew.contract.run_views import BatchStatus, RequestCounts
from toolcrew.store.batches import BatchRecord


def build_status(batch: str, record: BatchRecord, counts: Mapping[str, int]) -> BatchStatus:
    """Return the status of a batch."""
    failed = {kind.value: count for kind, count in record.failed.items() if count}
    return BatchStatus(
        id=batch,
        status=record.state.value,
        name=record.name or None,
        request_counts=RequestCounts(
            total=record.total, completed=record.succeeded, failed=sum(failed.values()), **counts
        ),
        failed=failed,
        concurrency=record.concurrency,
        created_at=record.created_at,
        ended_at=record.ended_at or None,
        webhook=record.webhook,
    )
