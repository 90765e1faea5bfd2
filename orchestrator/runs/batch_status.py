"""Status of a batch, for `--json`, for the API and for webhooks."""

from collections.abc import Mapping

from toolcrew.contract.calls import Record
from toolcrew.contract.clock import Instant
from toolcrew.contract.webhooks import WebhookDelivery
from toolcrew.store.batches import BatchRecord


class RequestCounts(Record):
    """Numbers of items: all, succeeded, failed, waiting and running."""

    total: int
    completed: int
    failed: int
    waiting: int = 0
    running: int = 0


class BatchStatus(Record):
    """A batch. `status`: in_progress, cancelling, cancelled or completed. `failed`: numbers of failures by kind.
    `concurrency`: items that run at the same time. Fields have the names of OpenAI's batches if they have the same
    meaning. Times are in ISO 8601.
    """

    id: str
    status: str
    name: str | None
    request_counts: RequestCounts
    failed: dict[str, int]
    concurrency: int
    created_at: Instant
    ended_at: Instant | None
    webhook: WebhookDelivery | None = None


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
