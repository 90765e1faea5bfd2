"""The progress of a run, built from its events: steps with text, calls and results, even if events are missing or
repeated.
"""

import json
import time
from typing import Any

from contract.run_events import TextArrived
from orchestrator.api.pages.run_progress import RunProgress
from orchestrator.traces.steps import LIVE_CHARS
from store.run_events import build_event

CALL = {"id": "r-1-1", "name": "bash_tool", "arguments": {"command": "ls"}}
FINISHED = {"step": 1, "model_s": 2.0, "usage": {"prompt_tokens": 3, "completion_tokens": 4}}
ASKED = {"call": CALL, "digest": "d", "reason": "r", "warning": "w", "expires_at": 9.0}
DECIDED = {"call_id": "r-1-1", "digest": "d", "is_allowed": True, "reason": ""}


def tell(progress: RunProgress, kind: str, **fields: Any) -> None:
    progress.add(json.dumps({"type": kind, "run": "r", "at": 1.0, "attempt": 1, **fields}))


def build_progress(*events: tuple[str, dict[str, Any]]) -> RunProgress:
    progress = RunProgress()
    for kind, fields in events:
        tell(progress, kind, **fields)
    return progress


def test_a_step_has_its_text_its_call_and_what_came_of_it() -> None:
    result = {"call_id": "r-1-1", "name": "bash_tool", "success": True, "output": "a"}
    progress = build_progress(
        ("StepStarted", {"step": 1}),
        ("TextArrived", {"text": "I looked"}),
        ("TextWithdrawn", {"characters": 4}),
        ("TextArrived", {"text": "ok"}),
        ("CallStarted", {"call": CALL}),
        ("CallSent", {"call": {**CALL, "arguments": {"command": "ls -l"}}}),
        ("CallFinished", {"result": result}),
        ("StepFinished", FINISHED),
    )
    (step,) = progress.steps.values()
    assert (step.id, step.text, step.tokens, step.is_over) == ("step-1-1", "I look", (3, 4), True)
    call = step.calls["r-1-1"]
    assert (call.state, call.arguments) == ("succeeded", {"command": "ls -l"})


def test_the_end_of_running_output_is_kept() -> None:
    progress = build_progress(("StepStarted", {"step": 1}), ("CallSent", {"call": CALL}))
    for _ in range(10):
        tell(progress, "OutputArrived", call_id="r-1-1", stream="stdout", text="x" * 4000)
    call = progress.steps["step-1-1"].calls["r-1-1"]
    assert (len(call.output), call.hidden, call.state) == (LIVE_CHARS, 40_000 - LIVE_CHARS, "running")


def test_a_call_that_waits_for_a_person_says_so_until_it_is_decided() -> None:
    progress = build_progress(("StepStarted", {"step": 1}), ("CallStarted", {"call": CALL}), ("ApprovalAsked", ASKED))
    call = progress.steps["step-1-1"].calls["r-1-1"]
    assert call.state == "waiting for approval"
    tell(progress, "ApprovalDecided", **DECIDED)
    assert call.state == "waiting"


def test_a_resumed_run_reports_its_step_again() -> None:
    progress = build_progress(
        ("StepStarted", {"step": 1}),
        ("StepFinished", FINISHED),
        ("StepStarted", {"step": 2}),
        ("TextArrived", {"text": "void"}),
        ("RunResumed", {"step": 2}),
        ("StepStarted", {"step": 2}),
        ("TextArrived", {"text": "anew"}),
    )
    assert [(step.id, step.text) for step in progress.steps.values()] == [("step-1-1", ""), ("step-1-2", "anew")]
    assert "continued the run from step 2" in progress.notes[0]


def test_events_whose_step_or_call_is_forgotten_do_no_harm() -> None:
    progress = build_progress(
        ("EventsMissed", {}),
        ("OutputArrived", {"call_id": "gone", "stream": "stdout", "text": "x"}),
        ("ApprovalDecided", {**DECIDED, "call_id": "gone"}),
        ("CallFinished", {"result": {"call_id": "late", "name": "t", "success": False}}),
        ("OfALaterRelease", {"anything": [1]}),
        ("RunStarted", {"instruction": "x", "model": "m", "dialect": "d"}),
    )
    (step,) = progress.steps.values()
    assert (step.number, [call.state for call in step.calls.values()]) == (0, ["failed"])


def test_only_what_has_changed_since_is_taken() -> None:
    progress = build_progress(("StepStarted", {"step": 1}), ("StepFinished", FINISHED), ("StepStarted", {"step": 2}))
    assert [step.number for step in progress.take_changed()] == [1, 2]
    assert progress.take_changed() == []
    tell(progress, "TextArrived", text="x")
    assert [step.number for step in progress.take_changed()] == [2]
    tell(progress, "RunEnded", state="succeeded")
    assert ([step.number for step in progress.take_changed()], progress.is_ended) == ([2], True)


def test_an_event_of_which_only_the_kind_was_kept_is_noted_and_does_no_harm() -> None:
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


def test_a_reply_in_thousands_of_pieces_takes_linear_time() -> None:
    progress, piece = RunProgress(), json.dumps(TextArrived(run="r", text="\u0430" * 1000).to_json())
    began = time.process_time()
    for _ in range(5000):
        progress.add(piece)
    (step,) = progress.steps.values()
    assert len(step.text) == 5_000_000
    assert time.process_time() - began < 2.0
