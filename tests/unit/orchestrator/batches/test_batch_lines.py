"""A batch file is validated as a whole, and every error is reported with its position."""

import io
import json
import os
import re
import tarfile
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from toolcrew.contract.calls import MAX_BLOB_BYTES
from toolcrew.contract.run_spec import ItemEnvironment, RunBody, RunLimits
from toolcrew.orchestrator.batches import lines as lines_module
from toolcrew.orchestrator.batches.line_shapes import GraderFields, ShortCall, ShortRun
from toolcrew.orchestrator.batches.lines import BadBatch, BatchFile, LineError, load_lines, read_lines
from toolcrew.orchestrator.batches.rows import parse_row
from toolcrew.store.batches import CALLS_URL, CHAT_URL, MAX_INPUT_BYTES, RUNS_URL, BatchItem, CallBody

slow_property = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
TEXT = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=40)
VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


def read(text: str | bytes, folder: Path = Path("/nowhere")) -> BatchFile:
    return read_lines(io.BytesIO(text.encode() if isinstance(text, str) else text), folder, "tasks.jsonl")


def read_one(folder: Path = Path("/nowhere"), **fields: Any) -> BatchItem:
    return read(json.dumps({"id": "a", **fields}), folder).items[0]


def openai_line(custom_id: str = "a", url: str = RUNS_URL, **body: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


def chat_line(*messages: dict[str, Any], **body: Any) -> str:
    return openai_line(url=CHAT_URL, messages=list(messages) or [{"role": "user", "content": "Hello"}], **body)


def read_error(text: str | bytes, folder: Path = Path("/nowhere")) -> str:
    with pytest.raises(BadBatch) as caught:
        read(text, folder)
    assert (caught.value.more, len(caught.value.errors)) == (0, 1)
    return str(caught.value.errors[0])


def test_a_line_with_an_instruction_is_a_run(tmp_path: Path) -> None:
    (tmp_path / "ws").mkdir()
    item = read_one(
        tmp_path,
        instruction="Count",
        workspace="ws",
        model="m",
        dialect="tags",
        tools=["bash_tool"],
        artifacts=["out/*.csv"],
        limits={"max_iterations": 9, "max_cost": 0.5},
        image="python:3.11",
        network="none",
        priority=3,
    )
    assert item.work == RunBody(
        instruction="Count",
        model="m",
        dialect="tags",
        tools=("bash_tool",),
        limits=RunLimits(max_iterations=9, max_cost=0.5),
    )
    assert item.environment == ItemEnvironment(
        workspace=str(tmp_path / "ws"), image="python:3.11", network="none", artifacts=("out/*.csv",)
    )
    assert (item.custom_id, item.line, item.url, item.priority) == ("a", 1, RUNS_URL, 3)


def test_an_openai_line_is_a_run_a_call_or_a_chat() -> None:
    run = read(openai_line(input="Count", restore="c1", history=[{"role": "user", "content": "Hi"}])).items[0]
    call = read(openai_line(url=CALLS_URL, name="bash_tool", arguments={"command": "ls"})).items[0]
    chat = read(
        chat_line(
            {"role": "system", "content": "Be kind"},
            {"role": "user", "content": "Hello"},
            max_tokens=5,
            n=1,
            stream=False,
        )
    )
    assert run.work == RunBody(instruction="Count", history=({"role": "user", "content": "Hi"},))
    assert run.environment.restore == "c1"
    assert call.work == CallBody(name="bash_tool", arguments={"command": "ls"})
    assert chat.url == CHAT_URL
    assert chat.items[0].work == RunBody(
        instruction="Hello",
        history=({"role": "system", "content": "Be kind"},),
        tools=(),
        limits=RunLimits(max_iterations=1),
        sampling={"max_tokens": 5},
    )


SAMPLE_FIELDS: dict[str, Any] = {
    "cpus": 1.5,
    "memory_bytes": 2**28,
    "workspace_bytes": 2**28,
    "pids": 64,
    "hostname": "build-1",
    "user": "root",
    "secrets": ["TOKEN", "OTHER"],
    "restore": "checkpoint",
    "image": "python:3.12",
    "network": "egress",
    "tool_config": {"bash_tool": {"level": [1, None]}},
    "artifacts": ["**/*.txt"],
    "priority": 3,
    "samples": 2,
    "history": [{"role": "user", "content": "Hi"}],
    "model": "gpt",
    "dialect": "tags",
    "profile": "small",
    "tools": ["bash_tool"],
    "limits": {
        "max_iterations": 2,
        "tool_timeout_s": 1.5,
        "max_wall_s": 60,
        "max_tokens": 100,
        "max_cost": 0.5,
    },
    "sampling": {"temperature": 0.5, "stop": ["END"]},
    "keep_states": True,
    "arguments": {"command": "true"},
    "timeout_s": 5,
    "reward_file": "/output/reward",
    "command": "true",
}
"""A JSON value of each optional field of a line or its grader, and of `command`."""
EXCLUSIVE_FIELDS = {"input", "workspace", "files", "fork", "grader"}
"""Fields that exclude others or name files. Other tests use them."""


def pick_samples(shape: type[BaseModel]) -> dict[str, Any]:
    required = {name for name, field in shape.model_fields.items() if field.is_required()} | {"instruction"}
    names = shape.model_fields.keys() - EXCLUSIVE_FIELDS - (required - SAMPLE_FIELDS.keys())
    return {name: SAMPLE_FIELDS[name] for name in names}


@pytest.mark.parametrize(
    ("shape", "required"),
    [(ShortRun, {"instruction": "Do it."}), (ShortCall, {"tool": "bash_tool"})],
)
def test_every_field_of_a_line_and_its_grader_is_accepted_as_json(
    shape: type[BaseModel], required: dict[str, Any]
) -> None:
    grader = pick_samples(GraderFields)
    line = {"id": "a", **required, **pick_samples(shape), "grader": grader}
    assert read_error(json.dumps(line)).startswith("line 1: `grader.secrets`: ")
    del grader["secrets"]
    item = read(json.dumps(line)).items[0]
    assert item.environment.secrets == ("TOKEN", "OTHER")
    assert item.environment.tool_config == SAMPLE_FIELDS["tool_config"]
    assert item.grader is not None


@slow_property
@given(
    st.lists(
        st.tuples(TEXT, TEXT, st.dictionaries(TEXT, VALUE, max_size=3)),
        min_size=1,
        max_size=5,
        unique_by=lambda entry: entry[0],
    )
)
def test_json_lines_are_parsed_without_changes(entries: list[tuple[str, str, dict[str, Any]]]) -> None:
    for escapes in (True, False):
        text = "\n".join(
            json.dumps({"id": name, "tool": tool, "arguments": arguments}, ensure_ascii=escapes)
            for name, tool, arguments in entries
        )
        items = read(text).items
        assert [(item.custom_id, item.work) for item in items] == [
            (name, CallBody(name=tool, arguments=arguments)) for name, tool, arguments in entries
        ]


def is_parsed_or_refused(raw: bytes) -> bool:
    try:
        return len(read(raw).items) > 0
    except BadBatch as error:
        return len(error.errors) > 0


@slow_property
@given(st.binary(max_size=80) | st.text(max_size=80).map(lambda text: text.encode("utf-8", "replace")))
def test_any_bytes_are_parsed_or_refused(raw: bytes) -> None:
    assert is_parsed_or_refused(raw)


FIELDS = st.sampled_from(
    ["id", "instruction", "workspace", "artifacts", "limits", "tool", "arguments", "custom_id", "body", "messages"]
)
CHAT = st.fixed_dictionaries(
    {"custom_id": VALUE, "method": st.just("POST"), "url": st.just(CHAT_URL) | VALUE, "body": VALUE}
)


@slow_property
@given(VALUE | CHAT | st.dictionaries(FIELDS, VALUE, max_size=6))
def test_any_json_is_parsed_or_refused(value: Any) -> None:
    assert is_parsed_or_refused(json.dumps(value).encode())


VALID_LINE = '{"id":"a","instruction":"x"}'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"id":"a","instructoin":"x"}', "line 1: `instructoin` is an unknown field: did you mean `instruction`?"),
        (
            '{"id":"a","instruction":"x","max_iterations":3}',
            "line 1: `max_iterations` is an unknown field: write it as `limits.max_iterations`",
        ),
        ('{"id":"a"}', "line 1: `instruction` is missing"),
        ('{"id":7,"instruction":"x"}', "line 1: `id` must be a string, not 7"),
        ('{"id":"","instruction":"x"}', "`id` must not be empty"),
        (json.dumps({"id": "a" * 257, "instruction": "x"}), "`id` must have at most 256 characters"),
        ('{"id":"a","instruction":"x","input":"y"}', "line 1: `input` is an alias of `instruction`"),
        (
            '{"id":"a","instruction":"x","limits":{"max_iterations":0}}',
            "`limits.max_iterations` must be at least 1, not 0",
        ),
        ('{"id":"a","instruction":"x","workspace":"/mnt","restore":"c1"}', "remove `workspace` or `restore`"),
        (
            '{"id":"a","instruction":"x","artifacts":["a","../b"]}',
            "line 1: `artifacts.1`: '../b' is not a valid pattern: the pattern contains '..'",
        ),
        ('{"id":"a","instruction":"x","artifacts":["/etc/passwd"]}', "the path is not below /workspace"),
        # The message of Python continues with "byte" or "character", by its version.
        ('{"id":"a","instruction":"x","workspace":"a\\u0000b"}', "embedded null"),
        ('{"id":"a","instruction":"x","id":"b"}', "(the key 'id' occurs twice)"),
        ('{"id":"a","tool":"t","arguments":{"NaN":1,"x":NaN}}', "NaN is not JSON"),
        ('{"id":"a","tool":"t","arguments":{"x":1e999}}', "1e999 is a number that is too large"),
        ('{"id":"a","tool":"t","arguments":{"x":' + "9" * 5000 + "}}", "line 1: the line is not one JSON object"),
        ('{"id":"a","tool":"t","arguments":{"x":' + "[" * 70 + "]" * 70 + "}}", "nested deeper than 64"),
        ("[" * 100_000, "more than 20000 values"),
        ('{"id":"a","instruction":"\\ud83d"}', "line 1: a text has a lone surrogate"),
        ('{"id":"a","instruction":"x"} {}', "line 1, column 30: the line is not one JSON object (extra data)"),
        ('{"id":"a","instruction":"x"', "line 1, column 28: the line is not one JSON object"),
        ('"a"', "line 1, column 1: the line is not one JSON object (it is a string"),
        (
            b'{"id":"a","instruction":"\xe9t\xe9"}',
            "line 1, column 26: the line is not one JSON object (it is not UTF-8 (byte 0xe9)",
        ),
        ("", "the file has no lines"),
        (VALID_LINE + "\n" + openai_line("b", instruction="x"), "line 2: this line has another shape than line 1"),
        (
            openai_line(input="x") + "\n" + openai_line("b", CALLS_URL, name="t"),
            "line 2: `url`: this is '/v1/tools/execute' and line 1 has",
        ),
        (f"{VALID_LINE}\n\n{VALID_LINE}", "line 3: `id`: 'a' is also the id of line 1"),
        (
            openai_line(url="/v1/embeddings"),
            "`url` must be '/v1/agent/runs', '/v1/tools/execute' or '/v1/chat/completions', not '/v1/embeddings'",
        ),
        (openai_line(input="x").replace("POST", "GET"), "`method` must be 'POST', not 'GET'"),
        (chat_line(n=2), "remove `n`"),
        (chat_line(stream=True), "remove `stream`"),
        (chat_line(logprobs=True), "remove `logprobs`"),
        (chat_line(store=True), "remove `store`"),
        (chat_line({"role": "user", "content": " "}), "the last message is empty"),
        (chat_line({"role": "robot", "content": "x"}), "the role is missing or unknown: use one of system, developer"),
        (chat_line({"role": "user", "content": None}), "the content is neither text nor a list of parts"),
        (chat_line(tools=[{"type": "function"}]), "use the url /v1/agent/runs"),
        (
            chat_line({"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}),
            "the last message does not have the role `user`",
        ),
        (
            chat_line({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}),
            "may contain only text",
        ),
    ],
)
def test_an_invalid_line_is_reported_with_its_position_and_the_fix(text: str | bytes, expected: str) -> None:
    assert expected in read_error(text)


def test_all_errors_are_counted_and_the_first_twenty_listed() -> None:
    with pytest.raises(BadBatch) as caught:
        read(
            "\n".join(json.dumps({"id": str(number), "instruction": "x", "a": 1, "b": 2}) for number in range(15))
            + "\nno JSON\n"
        )
    assert (len(caught.value.errors), caught.value.more) == (20, 11)
    assert str(caught.value).startswith(
        "tasks.jsonl has 31 errors; nothing was started. Fix the file and submit it again\n  line 1: "
    )
    assert str(caught.value).endswith("\n  and 11 more")


def test_errors_of_all_kinds_are_reported_together(tmp_path: Path) -> None:
    lines = [
        json.dumps({"id": "a", "promt": "x", "workspace": "missing", "restore": "c", "artifacts": ["../x"]}),
        json.dumps({"id": "b", "workspace": "gone", "restore": "c", "sampling": {"heat": 1}, "grader": {"files": "g"}}),
        chat_line({"role": "robot", "content": "x"}, n=2, stream=True),
        json.dumps({"id": "d", "instruction": "x"}),
        "no JSON",
    ]
    with pytest.raises(BadBatch) as caught:
        read("\n".join(lines), tmp_path)
    errors = [str(error) for error in caught.value.errors]
    for line, text in (
        (1, "`promt` is an unknown field"),
        (1, "`instruction` is missing"),
        (1, "remove `workspace` or `restore`"),
        (1, "`workspace`: "),
        (1, "`artifacts.0`: "),
        (2, "`grader.command` is missing"),
        (2, "`workspace`: "),
        (2, "`heat` is not a sampling field"),
        (3, "this line has another shape"),
        (3, "remove `n`"),
        (3, "remove `stream`"),
        (3, "the role is missing or unknown"),
        (5, "the line is not one JSON object"),
    ):
        assert any(error.startswith(f"line {line}") and text in error for error in errors), (line, text, errors)
    assert caught.value.file is not None
    assert [item.line for item in caught.value.file.items] == [4]


def test_joined_errors_are_sorted_by_line_and_bounded() -> None:
    first = BadBatch("in.jsonl", [LineError("a", 3), LineError("whole")], 0)
    joined = first.join(BadBatch("in.jsonl", [LineError("b", number) for number in range(1, 21)], 5))
    assert [error.line for error in joined.errors[:4]] == [None, 1, 2, 3]
    assert (len(joined.errors), joined.more) == (20, 7)
    assert "in.jsonl has 27 errors" in str(joined)


def test_a_workspace_that_is_not_an_archive_is_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar.bz2", "w:bz2") as archive:
        archive.add(__file__, "a.py")
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "part.bundle").write_text("# v2 git bundle\n-0123 old\n0123 HEAD\n\n")
    assert read_one(tmp_path, instruction="x", workspace="a.tar.bz2").environment.workspace == str(
        tmp_path / "a.tar.bz2"
    )
    for name, result in (
        ("notes.txt", "is of no supported kind"),
        ("missing", "does not exist"),
        ("part.bundle", "only a part of a history"),
    ):
        assert result in read_error(json.dumps({"id": "a", "instruction": "x", "workspace": name}), tmp_path)


def test_an_archive_is_detected_by_its_header_and_limited_in_size(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        entry = tarfile.TarInfo("big")
        archive.addfile(entry)
    with (tmp_path / "a.tar").open("r+b") as file:
        file.truncate(2 * 1024 * 1024)
    assert read_one(tmp_path, instruction="x", workspace="a.tar").environment.workspace is not None
    with (tmp_path / "a.tar").open("r+b") as file:
        file.truncate(MAX_BLOB_BYTES + 1)
    assert "is larger than" in read_error('{"id":"a","instruction":"x","workspace":"a.tar"}', tmp_path)


def test_the_first_line_above_the_item_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines_module, "MAX_ITEMS", 2)
    assert "line 4: the file has more than 2 lines" in read_error(
        "\n".join(json.dumps({"id": str(n), "instruction": "x"}) if n else "" for n in range(9))
    )


def test_a_file_or_line_above_the_size_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines_module, "MAX_LINE_BYTES", 40)
    assert read(VALID_LINE + " " * (40 - len(VALID_LINE)) + "\r\n").items
    assert "line 1: the line is longer than 40 bytes" in read_error(VALID_LINE + " " * 80)
    monkeypatch.setattr(lines_module, "MAX_INPUT_BYTES", 30)
    assert "the file is larger than 30 bytes" in read_error(VALID_LINE + "\n" + VALID_LINE)


def test_the_examples_in_docs_batches_are_valid(tmp_path: Path) -> None:
    page = (Path(__file__).parents[4] / "docs" / "batches.md").read_text()
    for folder in ("repo.tar.gz", "grader"):
        (tmp_path / folder).mkdir()
    short, openai, rows, graded = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    assert [len(read(text, tmp_path).items) for text in (short, openai, graded)] == [2, 1, 4]
    assert [parse_row(line.encode()).custom_id for line in rows.splitlines()] == ["q1", "q2"]


def test_a_line_of_many_small_values_uses_at_most_twice_its_size_in_memory(tmp_path: Path) -> None:
    values: list[Any] = [[]] * 19_000
    text = json.dumps({"id": "a", "tool": "t", "arguments": {"values": values}})
    tracemalloc.start()
    try:
        file = read("\n".join(text.replace('"a"', f'"{number}"', 1) for number in range(6)), tmp_path)
        held_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert held_bytes < 2 * 6 * len(text)
    assert [item.custom_id for item in file.items] == [str(number) for number in range(6)]
    assert file.items[3].work == file.items[-1].work == CallBody(name="t", arguments={"values": values})
    assert [item.line for item in file.items[1:3]] == [2, 3]


def test_the_samples_of_a_line_hold_its_text_once(tmp_path: Path) -> None:
    line = {"id": "a", "tool": "t", "arguments": {"values": ["x" * 1000] * 100}, "samples": 500}
    text = json.dumps(line)
    read(text.replace("500", "1"), tmp_path)
    tracemalloc.start()
    try:
        file = read(text, tmp_path)
        held_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert held_bytes < 10 * len(text)
    assert [item.custom_id for item in file.items] == [f"a#{number}" for number in range(1, 501)]
    assert file.items[499].work == file.items[0].work == CallBody(name="t", arguments=line["arguments"])


def test_the_samples_of_all_lines_count_towards_the_size_of_a_file(tmp_path: Path) -> None:
    size = MAX_INPUT_BYTES // 1000
    line = {"instruction": "x" * (size // 2), "samples": 1000}
    assert len(read(json.dumps({"id": "a", **line, "samples": 1}), tmp_path).items) == 1
    with pytest.raises(BadBatch, match=str(MAX_INPUT_BYTES)):
        read("\n".join(json.dumps({"id": name, **line}) for name in "abc"), tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("pipe", "not a regular file"),
        ("folder", "cannot be read"),
        ("missing", "does not exist"),
        (bytes(range(256)) * 64, "it is not UTF-8 \\(byte 0x80\\)"),
        (b"", "the file has no lines"),
        (b"\n \r\n", "the file has no lines"),
    ],
)
def test_a_path_that_is_not_a_file_with_lines_is_refused(tmp_path: Path, content: str | bytes, message: str) -> None:
    path = tmp_path / "tasks.jsonl"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content != "missing":
        {"pipe": os.mkfifo, "folder": os.mkdir}[content](path)
    with pytest.raises(BadBatch, match=message):
        load_lines(path)


def test_the_item_environment_keeps_its_stored_field_name() -> None:
    item = BatchItem(
        custom_id="a", line=1, url="/v1/tools/execute", work=CallBody(name="x"), environment=ItemEnvironment(image="i")
    )
    stored = item.model_dump_json()
    assert json.loads(stored)["environment"]["image"] == "i"
    assert BatchItem.model_validate_json(stored) == item
