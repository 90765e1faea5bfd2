"""`toolcrew batches rollouts`: write the rollout records of a batch."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from toolcrew.contract.errors import ConfigError
from toolcrew.contract.plurals import count
from toolcrew.contract.run_spec import RunBody
from toolcrew.contract.settings import load_settings
from toolcrew.orchestrator.batches.rollouts import build_rollouts, write_jsonl, write_parquet
from toolcrew.orchestrator.cli.batches_views import BatchId
from toolcrew.orchestrator.cli.clients import open_pool_client
from toolcrew.orchestrator.cli.runner import Json, Output, Tenant, as_command
from toolcrew.orchestrator.traces.reading import find_attempts, load_trace
from toolcrew.store.batches import BatchItem, ItemOutcome


@as_command
async def batches_rollouts(
    batch: BatchId,
    output: Annotated[Path, typer.Option("--output", help="The file to write.")],
    file_format: Annotated[
        Literal["jsonl", "parquet"],
        typer.Option("--format", help="jsonl: a JSON object per line; parquet: needs toolcrew[parquet]."),
    ] = "jsonl",
    tenant: Tenant = None,
    as_json: Json = False,
) -> Output:
    """Write a record for each request to the model, with its tokens and the reward of its item, for training.

    Reads the traces of the batch on this machine (TOOLCREW_TRACES).
    """
    async with open_pool_client(tenant) as client:
        runs, missing = client.batch_runs(), list[str]()
        await runs.batches.status(batch)
        ended = [(item, outcome) async for item, outcome in runs.ended(batch) if isinstance(item.work, RunBody)]
        write = write_jsonl if file_format == "jsonl" else write_parquet
        try:
            written = write(output, _read_records(ended, runs.tenant, missing))
        except OSError as error:
            raise ConfigError(f"{output} cannot be written ({error.strerror or error}): give another path") from error
    notes = [count(written, "record")]
    if missing:
        place = load_settings().traces
        items = count(len(missing), "item has", "items have")
        notes.append(f"toolcrew: warning: {items} no trace in {place}: run this where they ran")
    return Output({"id": batch, "records": written, "items_without_trace": len(missing)}, notes=notes)


def _read_records(
    ended: list[tuple[BatchItem, ItemOutcome]], tenant: str, missing: list[str]
) -> Iterator[dict[str, Any]]:
    """Yield the records of all items. Adds items without a trace to `missing`."""
    folder = load_settings().traces
    for item, outcome in ended:
        try:
            trace = load_trace(find_attempts(folder, outcome.run, tenant)[-1])
        except ConfigError:
            missing.append(item.custom_id)
            continue
        assert isinstance(item.work, RunBody)
        yield from build_rollouts(outcome, item.work, trace)
