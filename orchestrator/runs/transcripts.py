"""The messages of a run that has not ended, out of its log."""

from collections.abc import Sequence
from typing import Any

from contract.calls import ToolResult
from orchestrator.dialects.base import CallRequested, MalformedCall
from orchestrator.dialects.native import NativeDialect
from orchestrator.dialects.observations import build_tool_messages
from store.batches import RunBody
from store.run_log import Entry, Replied, Resulted
from store.runs import RunRecord


def build_transcript(run: str, record: RunRecord, entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """What has been said so far: the request, each reply, and the results of its calls. Results are tool messages here,
    however the model is told of them. Without the system prompt, which is made when the run is worked."""
    messages: list[dict[str, Any]] = []
    if isinstance(record.item.work, RunBody):
        messages += [dict(message) for message in record.item.work.history]
        messages.append({"role": "user", "content": record.item.work.instruction})
    name, step, known = run if record.attempt == 1 else f"{run}-{record.attempt}", 0, dict[str, str]()
    for entry in entries:
        if isinstance(entry, Replied):
            step += 1
            reader = NativeDialect().open_reader(name, step, reads_tags=False)
            events = [event for chunk in entry.chunks for event in reader.feed(chunk)]
            last, end = reader.finish()
            for event in [*events, *last]:
                if isinstance(event, CallRequested) and event.model_id:
                    known[event.call.id] = event.model_id
                elif isinstance(event, MalformedCall) and event.model_id:
                    known[event.call_id] = event.model_id
            messages.append(end.message)
        elif isinstance(entry, Resulted):
            messages += _observed(known, entry.result)
    return messages


def _observed(known: dict[str, str], result: ToolResult) -> list[dict[str, Any]]:
    return build_tool_messages([(known.get(result.call_id, result.call_id), result)])
