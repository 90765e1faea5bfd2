"""Rollout records of a batch, for training: one record for each request to the model, from the traces of its items."""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from toolcrew.contract.errors import ConfigError
from toolcrew.contract.run_events import ModelAsked, ReplyTokens
from toolcrew.contract.run_spec import RunBody
from toolcrew.orchestrator.traces.reading import Trace
from toolcrew.store.batches import ItemOutcome

_JSON_COLUMNS = ("prompt", "tools", "sampling", "completion", "scores")
"""Columns that Parquet files have as JSON texts: their shape differs from row to row."""
_ROWS_AT_ONCE = 1000


def build_rollouts(outcome: ItemOutcome, body: RunBody, trace: Trace) -> Iterator[dict[str, Any]]:
    """Yield a record for each request of an item that has a reply.

    `prompt`, `tools`, `sampling`: the values that were sent to the model. `completion`: the reply as a message.
    `reward` None: the item has no grade. Secrets are masked, as in the trace.
    """
    grade, failure = outcome.grade, outcome.failure
    answered = [step for step in trace.steps if step.reply is not None]
    tools, tools_of = list[dict[str, Any]](), dict[int, list[dict[str, Any]]]()
    for event in trace.attempt:
        if isinstance(event, ModelAsked):
            tools = tools if event.new_tools is None else event.new_tools
            tools_of[event.step] = tools
    for step in answered:
        assert step.reply is not None
        request, tokens = step.request, step.reply.tokens or ReplyTokens()
        yield {
            "run": outcome.run,
            "custom_id": outcome.custom_id,
            "task": outcome.task or outcome.custom_id,
            "attempt": outcome.attempt,
            "step": step.number,
            "is_last": step is answered[-1],
            "model": trace.start.model if trace.start is not None else None,
            "prompt": step.messages,
            "tools": tools_of.get(step.number, []),
            "sampling": {**(request.extra if request is not None else {}), **body.sampling},
            "completion": step.reply.message,
            "finish_reason": step.reply.finish_reason,
            "prompt_tokens": step.reply.usage.prompt_tokens,
            "completion_tokens": step.reply.usage.completion_tokens,
            "prompt_token_ids": list(tokens.prompt_token_ids),
            "completion_token_ids": list(tokens.completion_token_ids),
            "logprobs": list(tokens.logprobs),
            "reward": grade.reward if grade is not None else None,
            "scores": dict(grade.scores) if grade is not None else {},
            "failure": f"{failure.kind}:{failure.code}" if failure is not None else None,
        }


def write_jsonl(path: Path, records: Iterable[Mapping[str, Any]]) -> int:
    """Write a record per line. Return the number of records. Raises OSError."""
    count = 0
    with path.open("w", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(record) + "\n")
            count += 1
    return count


def write_parquet(path: Path, records: Iterable[Mapping[str, Any]]) -> int:
    """Write a Parquet file. Return the number of records. Raises ConfigError: pyarrow is missing. Raises OSError."""
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError:
        raise ConfigError(
            "Parquet needs pyarrow, which is not installed: pip install 'toolcrew[parquet]', or use --format jsonl"
        ) from None
    texts = ("run", "custom_id", "task", "model", "finish_reason", "failure", *_JSON_COLUMNS)
    schema = pa.schema(
        [
            *((name, pa.string()) for name in texts),
            *((name, pa.int64()) for name in ("attempt", "step", "prompt_tokens", "completion_tokens")),
            ("is_last", pa.bool_()),
            ("reward", pa.float64()),
            *((name, pa.list_(pa.int32())) for name in ("prompt_token_ids", "completion_token_ids")),
            ("logprobs", pa.list_(pa.float64())),
        ]
    )
    count, rows = 0, list[dict[str, Any]]()
    with parquet.ParquetWriter(path, schema) as writer:
        for record in records:
            rows.append({**record, **{name: json.dumps(record[name]) for name in _JSON_COLUMNS}})
            count += 1
            if len(rows) == _ROWS_AT_ONCE:
                writer.write_table(pa.Table.from_pylist(rows, schema))
                rows.clear()
        writer.write_table(pa.Table.from_pylist(rows, schema))
    return count
