"""The progress of a run, built from its events: steps with text, calls and results, even if events are missing or
repeated.
"""

import json
import time
from typing import Any

from toolcrew.contract.run_events import TextArrived
from toolcrew.orchestrator.api.pages.run_progress import RunProgress
from toolcrew.orchestrator.traces.steps import LIVE_CHARS
from toolcrew.store.run_events import build_event

CALL = {"id": "r-1-1", "name": "bash_tool", "arguments": {"command": "ls"}}
STEP_FINISHED = {"step": 1, "model_s": 2.0, "usage": {"prompt_tokens": 3, "completion_tokens": 4}}
APPROVAL_ASKED = {"call": CALL, "digest": "d", "reason": "r", "warning": "w", "expires_at": 9.0}
APPROVAL_DECIDED = {"call_id": "r-1-1", "digest": "d", "is_allowed": True, "reason": ""}


def add_event(progress: RunProgress, kind: str, **fields: Any) -> None:
    progress.add(json.dumps({"type": kind, "run": "r", "at": 1.0, "attempt": 1, **fields}))


def build_progress(*events: tuple[str, dict[str, Any]]) -> RunProgress:
    progress = RunProgress()
    for kind, fields in events:
        add_event(progress, kind, **fields)
    return progress


def test_step_has_its_text_calls_and_results() -> None:
    result = {"call_id": "r-1-1", "name": "bash_tool", "success": True, "output": "a"}
    progress = build_progress(
        ("StepStarted", {"step": 1}),
        ("TextArrived", {"text": "I looked"}),
        ("TextWithdrawn", {"characters": 4}),
        ("TextArrived", {"text": "ok"}),
        ("CallStarted", {"call": CALL}),
        ("CallSent", {"call": {**CALL, "arguments": {"command": "ls -l"}}}),
        ("CallFinished", {"result": result}),
        ("StepFinished", STEP_FINISHED),
    )
    (step,) = progress.steps.values()
    assert (step.id, step.text, step.tokens, step.is_over) == ("step-1-1", "I look", (3, 4), True)
    call = step.calls["r-1-1"]
    assert (call.state, call.arguments) == ("succeeded", {"command": "ls -l"})


def test_only_the_end_of_live_output_is_kept() -> None:
    progress = build_progress(("StepStarted", {"step": 1}), ("CallSent", {"call": CALL}))
    for _ in range(10):
        add_event(progress, "OutputArrived", call_id="r-1-1", stream="stdout", text="x" * 4000)
    call = progress.steps["step-1-1"].calls["r-1-1"]
    assert (len(call.output), call.hidden, call.state) == (LIVE_CHARS, 40_000 - LIVE_CHARS, "running")


def test_call_shows_that_it_waits_for_approval_until_decided() -> None:
    progress = build_progress(
        ("StepStarted", {"step": 1}), ("CallStarted", {"call": CALL}), ("ApprovalAsked", APPROVAL_ASKED)
    )
    call = progress.steps["step-1-1"].calls["r-1-1"]
    assert call.state == "waiting for approval"
    add_event(progress, "ApprovalDecided", **APPROVAL_DECIDED)
    assert call.state == "waiting"


def test_resumed_run_replaces_its_interrupted_step() -> None:
    progress = build_progress(
        ("StepStarted", {"step": 1}),
        ("StepFinished", STEP_FINISHED),
        ("StepStarted", {"step": 2}),
        ("TextArrived", {"text": "void"}),
        ("RunResumed", {"step": 2}),
        ("StepStarted", {"step": 2}),
        ("TextArrived", {"text": "anew"}),
    )
    assert [(step.id, step.text) for step in progress.steps.values()] == [("step-1-1", ""), ("step-1-2", "anew")]
    assert "continued the run from step 2" in progress.notes[0]


def test_events_of_unknown_steps_or_calls_are_tolerated() -> None:
    progress = build_progress(
        ("EventsMissed", {}),
        ("OutputArrived", {"call_id": "gone", "stream": "stdout", "text": "x"}),
        ("ApprovalDecided", {**APPROVAL_DECIDED, "call_id": "gone"}),
        ("CallFinished", {"result": {"call_id": "late", "name": "t", "success": False}}),
        ("OfALaterRelease", {"anything": [1]}),
        ("RunStarted", {"instruction": "x", "model": "m", "dialect": "d"}),
    )
    (step,) = progress.steps.values()
    assert (step.number, [call.state for call in step.calls.values()]) == (0, ["failed"])


def test_take_changed_returns_only_steps_changed_since_the_last_call() -> None:
    progress = build_progress(
        ("StepStarted", {"step": 1}), ("StepFinished", STEP_FINISHED), ("StepStarted", {"step": 2})
    )
    assert [step.number for step in progress.take_changed()] == [1, 2]
    assert progress.take_changed() == []
    add_event(progress, "TextArrived", text="x")
    assert [step.number for step in progress.take_changed()] == [2]
    add_event(progress, "RunEnded", state="succeeded")
    assert ([step.number for step in progress.take_changed()], progress.is_ended) == ([2], True)


def test_truncated_event_is_noted_and_tolerated() -> None:
    call = {"id": "c", "name": "bash_tool", "arguments": {f"name {number}": "x" for number in range(5000)}}
    event = build_event({"type": "CallStarted", "run": "r", "at": 1.0, "attempt": 1, "step": 1, "call": call})
    assert "call" not in json.loads(event)
    progress = RunProgress()
    for kind in (
        "CallStarted",
        "CallSent",
        "ApprovalAsked",
        "ApprovalDecided",
        "OutputArrived",
        "CallFinished",
        "TextArrived",
        "Warned",
    ):
        progress.add(event.replace("CallStarted", kind))
    assert progress.notes[0] == "A CallStarted event was too large for the stream. The transcript has it."
    assert len(progress.notes) == 8


def test_reply_in_thousands_of_chunks_takes_linear_time() -> None:
    progress, piece = RunProgress(), json.dumps(TextArrived(run="r", text="\u0430" * 1000).to_json())
    began = time.process_time()
    for _ in range(5000):
        progress.add(piece)
    (step,) = progress.steps.values()
    assert len(step.text) == 5_000_000
    assert time.process_time() - began < 2.0
