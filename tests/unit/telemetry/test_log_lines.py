"""A log event as one line: bounded, parseable and free of secrets. No content can forge another event or control a
terminal.
"""

import json
import logging
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolcrew.contract.masking import Masker
from toolcrew.orchestrator.operations.local_stack import find_start_failure
from toolcrew.telemetry.log_lines import FIELDS, MAX_LINE_BYTES, LogLines, RecordLines, describe_exception, escape_line

PASSWORD = "correct-horse-battery"
FORMS = ("json", "console")
COLOR = re.compile("\x1b\\[[0-9;]+m")
HOSTILE = 'a\nlevel=error event=forged\r\x1b[2J\x07\u202egnp.exe\u2028b\x85\x00\ud800"=\\'
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=8,
)


def build(form: str = "json", secrets: dict[str, str] | None = None, event: str = "call_ended", **fields: Any) -> str:
    """Build a line, without the colors of the console."""
    lines = LogLines(Masker(secrets or {}), {"service": "worker"}, is_console=form == "console")
    return COLOR.sub("", lines.build("info", event, 1_760_000_000.0, fields))


def read(**fields: Any) -> dict[str, Any]:
    reply: dict[str, Any] = json.loads(build(**fields))
    return reply


def test_line_begins_with_time_level_event_and_owner() -> None:
    assert build(seconds=0.5, call="c", tenant="acme", ok=True) == (
        '{"timestamp":"2025-10-09T08:53:20.000Z","level":"info","event":"call_ended","service":"worker","tenant":"acme","call":"c","seconds":0.5,"ok":true}'
    )
    assert (
        build("console", why="no room", gone=None, ok=False)
        == '08:53:20.000 info     call_ended               service=worker why="no room" gone= ok=false'
    )


@pytest.mark.parametrize("form", FORMS)
def test_hostile_text_cannot_forge_a_line_or_control_the_terminal(form: str) -> None:
    line = build(form, said=HOSTILE, **{f"x {HOSTILE}": 1}, listed=[HOSTILE])
    assert line.isprintable()
    assert "\\x1b[2J" in line.replace("\\\\", "\\")
    assert read(said=HOSTILE)["said"].isprintable(), "a program may print it raw"


@given(st.sampled_from(FORMS), st.dictionaries(st.text(min_size=1), values, max_size=8), st.text())
def test_any_fields_are_one_bounded_line_of_printable_text(form: str, fields: dict[str, Any], event: str) -> None:
    line = LogLines(Masker(), is_console=form == "console").build("info", event, 1.0, fields)
    assert COLOR.sub("", line).isprintable()
    assert len(line.encode()) <= MAX_LINE_BYTES
    if form == "json":
        assert json.loads(line)["level"] == "info"


@settings(deadline=None)
@given(st.characters())
def test_line_with_huge_fields_keeps_the_owner_fields(character: str) -> None:
    fields = {name: character * 3000 for name in FIELDS}
    line = LogLines(Masker()).build("info", "x", 1.0, {**fields, "more": "z" * 5000})
    assert len(line.encode()) <= MAX_LINE_BYTES
    assert set(FIELDS) <= set(json.loads(line))


@pytest.mark.parametrize("form", FORMS)
def test_cut_value_reports_its_full_length(form: str) -> None:
    assert "... (100000 characters)" in build(form, text="x" * 100_000)


def test_omitted_fields_are_counted() -> None:
    assert read(**{f"f{number}": "x" * 100 for number in range(200)})["fields_left_out"] == 200


@pytest.mark.parametrize("form", FORMS)
def test_secrets_are_masked_by_field_name_and_by_value(form: str) -> None:
    line = build(
        form,
        {"TOOLCREW_SECRET": PASSWORD},
        api_key="tiny",
        error=f"cannot reach redis://:{PASSWORD}@db/0 and redis://x:other-word@db/0",
        listed=[f"a {PASSWORD}"],
        nested={"deep": PASSWORD},
        settings={"api_key": "hunter2", "inner": [{"PASSWORD": "hunter3", "name": "kept"}], "token": ""},
    )
    assert not [word for word in (PASSWORD, "tiny", "other-word", "hunter") if word in line]
    assert "kept" in line


def test_secret_at_the_cut_position_is_masked_whole() -> None:
    assert "correct-h" not in build(secrets={"s": PASSWORD}, text="x" * 1990 + PASSWORD + "y" * 100)


def test_exception_is_one_line_with_causes_and_traceback() -> None:
    def fail() -> None:
        try:
            raise KeyError("a\nb")
        except KeyError as error:
            raise ValueError("outer") from error

    with pytest.raises(ValueError, match="outer") as raised:
        fail()
    result = read(exc_info=raised.value)
    assert result["exception"] == "ValueError: outer; caused by KeyError: 'a\\nb'"
    assert "unit/telemetry/test_log_lines.py:" in result["traceback"]
    assert " fail" in result["traceback"]


def test_exception_group_lists_members_and_cyclic_causes_end() -> None:
    one, other = ValueError("one"), KeyError("other")
    one.__cause__, other.__cause__ = other, one
    assert (
        describe_exception(ExceptionGroup("some", [one]))[0]
        == "ExceptionGroup: some (1 sub-exception); of which ValueError: one; caused by KeyError: 'other'"
    )


def test_exception_with_a_failing_str_is_reported() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert read(exc_info=Mute(), value=Mute())["exception"] == "Mute: the message cannot be shown"
    assert read(value=Mute())["value"] == "a Mute that cannot be shown"


def test_library_log_record_is_one_event_with_its_message() -> None:
    lines = RecordLines(LogLines(Masker()))
    record = logging.LogRecord("celery.worker", logging.WARNING, "f", 1, "lost %s\nagain", ("x",), None)
    reply = json.loads(lines.format(record))
    assert (reply["event"], reply["logger"], reply["message"], reply["level"]) == (
        "library_message",
        "celery.worker",
        "lost x\\nagain",
        "warning",
    )
    malformed = logging.LogRecord("celery.worker", logging.WARNING, "f", 1, "%d", ("x",), None)
    assert json.loads(lines.format(malformed))["message"] == "%d ('x',)"


def test_start_failure_is_found_in_log_lines() -> None:
    sentence = 'set "X" to /a b: then \\ try again'
    lines = [
        build(event="worker_starting"),
        build(event="not_started", error=sentence),
        "and then",
        '{"event":"not_started"',
    ]
    assert find_start_failure(lines) == sentence
    assert find_start_failure([build(event="worker_starting", error="x")]) is None


@given(st.text())
def test_escape_line_changes_only_unprintable_text(text: str) -> None:
    escaped = escape_line(text)
    assert escaped.isprintable()
    assert escaped == text or not text.isprintable()
