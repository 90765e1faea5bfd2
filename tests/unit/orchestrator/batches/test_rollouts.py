"""Rollout records: the tokens of an endpoint's reply, and the messages and rewards of a batch's items."""

import json
from pathlib import Path
from typing import Any

import pytest

from toolcrew.contract.functions.completions import TokenUsage
from toolcrew.contract.masking import Masker
from toolcrew.contract.run_events import Grade, ModelAnswered, RunStarted
from toolcrew.contract.run_spec import RunBody
from toolcrew.orchestrator.batches.lines import BadBatch, load_lines
from toolcrew.orchestrator.batches.rollouts import build_rollouts, write_jsonl, write_parquet
from toolcrew.orchestrator.dialects.model import ModelRequest
from toolcrew.orchestrator.dialects.tokens import TokenCollector
from toolcrew.orchestrator.loop.agent import build_model_asked
from toolcrew.orchestrator.models.chunks import split_reply
from toolcrew.orchestrator.runs.chunks import join_chunks
from toolcrew.orchestrator.traces.export_atif import build_atif
from toolcrew.orchestrator.traces.reading import Trace, load_trace
from toolcrew.orchestrator.traces.recorder import open_trace, trace_path
from toolcrew.store.batches import ItemOutcome

VLLM: list[dict[str, Any]] = [
    {"prompt_token_ids": [1, 2, 3], "choices": [{"delta": {"role": "assistant", "content": ""}}]},
    {"choices": [{"delta": {"content": "a"}, "token_ids": [7], "logprobs": {"content": [{"logprob": -0.5}]}}]},
    {"choices": [{"delta": {"content": "b"}, "token_ids": [8], "logprobs": {"content": [{"logprob": -1}]}}]},
    {"choices": [{"delta": {}, "finish_reason": "stop"}]},
]


def collect(chunks: list[dict[str, Any]]) -> Any:
    collector = TokenCollector()
    for chunk in chunks:
        collector.feed(chunk)
    return collector.build()


def test_tokens_are_collected_from_each_kind_of_endpoint() -> None:
    expected = {"prompt_token_ids": (1, 2, 3), "completion_token_ids": (7, 8), "logprobs": (-0.5, -1.0)}
    assert collect(VLLM).model_dump() == expected
    # A log stores joined chunks.
    assert collect(join_chunks(VLLM)) == collect(VLLM)
    reply = {
        "prompt_token_ids": [1, 2, 3],
        "choices": [
            {
                "message": {"role": "assistant", "content": "ab"},
                "token_ids": [7, 8],
                "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -1}]},
            }
        ],
    }
    assert collect(list(split_reply(reply) or ())).model_dump() == expected
    llama = [{"choices": [{"delta": {}, "logprobs": {"content": [{"id": 9, "logprob": -0.1}]}}]}]
    assert collect(llama).completion_token_ids == (9,)
    assert collect([{"choices": [{"delta": {"content": "a"}}]}, {"usage": {}}]) is None


def record(folder: Path) -> Trace:
    """Return the trace of a run with two requests."""
    first = ModelRequest([{"role": "user", "content": "do"}], [{"type": "function", "function": {"name": "echo"}}])
    call = {"role": "assistant", "content": "ab", "tool_calls": []}
    second = ModelRequest([*first.messages, call, {"role": "tool", "content": "x"}], first.tools)
    with open_trace(folder, "acme", "r1", masker=Masker()) as recorder:
        recorder.on_event(RunStarted(run="r1", instruction="do", model="m", dialect="native"))
        previous = ModelRequest([])
        for step, (request, message) in enumerate(((first, call), (second, {"role": "assistant", "content": "c"})), 1):
            recorder.on_event(build_model_asked("r1", step, request, previous))
            answered = ModelAnswered(
                run="r1",
                step=step,
                message=message,
                finish_reason="stop",
                usage=TokenUsage(3, 2),
                model_s=0.1,
                tokens=collect(VLLM) if step == 1 else None,
            )
            assert "tokens" not in answered.to_json()
            recorder.on_event(answered)
            previous = request
    return load_trace(trace_path(folder, "acme", "r1"))


def records_of(folder: Path) -> list[dict[str, Any]]:
    outcome = ItemOutcome(custom_id="q#1", run="r1", status_code=200, task="q", grade=Grade(reward=0.5))
    body = RunBody(instruction="do", sampling={"logprobs": True})
    return list(build_rollouts(outcome, body, record(folder)))


def test_rollout_record_has_prompt_completion_and_reward(tmp_path: Path) -> None:
    first, second = records_of(tmp_path)
    assert first["prompt"] == [{"role": "user", "content": "do"}]
    assert second["prompt"][:2] == [*first["prompt"], first["completion"]]
    assert first["tools"] == second["tools"] == [{"type": "function", "function": {"name": "echo"}}]
    assert (first["prompt_token_ids"], first["completion_token_ids"], first["logprobs"]) == (
        [1, 2, 3],
        [7, 8],
        [-0.5, -1],
    )
    assert (second["completion_token_ids"], second["is_last"], first["is_last"]) == ([], True, False)
    assert [(one["task"], one["reward"], one["sampling"]) for one in (first, second)] == [
        ("q", 0.5, {"logprobs": True})
    ] * 2
    assert write_jsonl(tmp_path / "out.jsonl", [first, second]) == 2
    assert [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()] == [first, second]


def test_trajectory_has_the_tokens(tmp_path: Path) -> None:
    steps = [step for step in build_atif(record(tmp_path))["steps"] if step["source"] == "agent"]
    metrics = steps[0]["metrics"]
    assert (metrics["prompt_token_ids"], metrics["completion_token_ids"], metrics["logprobs"]) == (
        [1, 2, 3],
        [7, 8],
        [-0.5, -1.0],
    )
    assert "completion_token_ids" not in steps[1]["metrics"]


def test_parquet_file_has_the_same_records(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    records = records_of(tmp_path)
    assert write_parquet(tmp_path / "out.parquet", records) == 2
    rows = parquet.read_table(tmp_path / "out.parquet").to_pylist()
    for row in rows:
        row.update({name: json.loads(row[name]) for name in ("prompt", "tools", "sampling", "completion", "scores")})
    assert rows == records


def test_sampling_fields_cannot_override_other_request_fields(tmp_path: Path) -> None:
    line = {"id": "q", "instruction": "x", "sampling": {"temperature": 1, "return_token_ids": True}}
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps(line))
    (item,) = load_lines(path).items
    assert isinstance(item.work, RunBody)
    assert item.work.sampling == line["sampling"]
    for name in ("messages", "model", "tools", "stream", "n"):
        path.write_text(json.dumps({**line, "sampling": {name: 1}}))
        with pytest.raises(BadBatch):
            load_lines(path)
