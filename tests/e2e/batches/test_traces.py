"""Traces of runs on a real pool: their calls run again in a fresh sandbox, and no secret in anything that is made of
them.
"""

import base64
import json
import re
import secrets
import shlex
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from orchestrator import ToolClient
from orchestrator.loop.limits import ReActOptions
from orchestrator.models.scripted import Calls, ScriptedModel
from orchestrator.traces.export_atif import build_atif
from orchestrator.traces.export_messages import build_openai, build_traj
from orchestrator.traces.export_otel import build_otel
from orchestrator.traces.page import build_page
from orchestrator.traces.reading import load_trace
from orchestrator.traces.recorded_calls import load_calls
from orchestrator.traces.replay import BUT_FOR, OF_A_JOB, Comparing, ReplayReport, replay
from orchestrator.traces.text_view import build_json, build_lines
from tests.stack import Footprint, Stack, run_toolcrew

pytestmark = [pytest.mark.stack, pytest.mark.timeout(200)]


def read_the_rest(messages: list[dict[str, Any]]) -> Calls:
    """Of a long output: its file has another name each time."""
    found = re.search(r"/output/command-\w+\.txt", str(messages[-1]["content"]))
    assert found is not None
    return Calls([("read_tool", {"file_path": found[0], "offset": 19_990})])


STEADY: list[Any] = [
    Calls([("write_tool", {"file_path": "a.txt", "content": "one\ntwo\n"})]),
    Calls(
        [
            ("edit_tool", {"file_path": "a.txt", "old_string": "two", "new_string": "three"}),
            ("read_tool", {"file_path": "a.txt"}),
        ]
    ),
    Calls([("bash_tool", {"command": "cat a.txt; exit 3"}), ("bash_tool", {"command": "sleep 20", "timeout": 0.5})]),
    # What differs each time, and says nothing: names made by chance, what it took, numbers of processes.
    Calls([("bash_tool", {"command": "mktemp; mktemp -d; echo pid $$; time true; ls -l a.txt; seq 20000"})]),
    read_the_rest,
    "done",
]
UNSTEADY: list[Any] = [
    Calls([("bash_tool", {"command": "echo $RANDOM$RANDOM$RANDOM", "background": True})]),
    Calls([("webfetch_tool", {"url": "http://127.0.0.1/"}), ("bash_tool", {"command": "echo $RANDOM$RANDOM$RANDOM"})]),
    "done",
]


@pytest.fixture
def traces(tmp_path: Path, stack: Stack, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of traces, where the environment names the shared stack."""
    folder = tmp_path / "traces"
    for name, value in (("TRACES", str(folder)), ("REDIS_URL", stack.redis_url), ("APPROVALS", "auto")):
        monkeypatch.setenv(f"TOOLCREW_{name}", value)
    return folder


async def run_traced(client: ToolClient, turns: list[Any]) -> Path:
    """The trace of a run that the turns have played."""
    result = await client.run("go", model=ScriptedModel(turns), options=ReActOptions(max_iterations=9), has_trace=True)
    assert result.stop_reason == "answered"
    return client.traces.folder / client.tenant / f"{result.run}.jsonl"


async def replay_in(client: ToolClient, path: Path) -> ReplayReport:
    """Its calls, run in a fresh sandbox."""
    calls, faults = load_calls(path)
    assert faults == []
    pools = {state.name: state.spec.pool for state in await client.tool_states()}
    async with await client.open_session() as session:
        return await replay(calls, session, Comparing(masker=client.traces.masker), pools=pools)


async def test_calls_run_again_give_the_same_and_what_was_changed_is_told(
    traces: Path, stack: Stack, footprint: Footprint
) -> None:
    async with ToolClient.connect() as client:
        path = await run_traced(client, STEADY)
        report = await replay_in(client, path)
        assert [(one.state, one.why) for one in report.calls] == [("same", "")] * 5 + [
            ("same", BUT_FOR),
            ("same", ""),
        ], report.to_json()
        exported = path.parent / "x.json"
        exported.write_text(json.dumps(build_atif(load_trace(path))))
        assert (await replay_in(client, exported)).is_same
    # A tool that gave something else then.
    path.write_text(path.read_text().replace("1\\tone\\n2\\tthree", "1\\tone\\n2\\ttwo"))
    environment = {"TOOLCREW_REDIS_URL": stack.redis_url, "TOOLCREW_TRACES": str(traces)}
    done = run_toolcrew(footprint, "trace", "replay", path.stem, environment=environment)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (1, "5 the same, 2 different"), done.stdout + done.stderr
    assert [line.split()[1] for line in done.stdout.splitlines() if line.startswith("DIFFERENT")] == [
        "edit_tool",
        "read_tool",
    ]
    assert ("   -2\ttwo" in done.stdout.splitlines(), "   +2\tthree" in done.stdout.splitlines()) == (True, True)


async def test_what_cannot_be_the_same_is_told_as_what_it_is(traces: Path) -> None:
    async with ToolClient.connect() as client:
        report = await replay_in(client, await run_traced(client, UNSTEADY))
    assert [one.state for one in report.calls] == ["different", "outside", "different"]
    assert (OF_A_JOB in report.calls[0].why, OF_A_JOB in report.calls[2].why, report.is_same) == (True, False, False)


def forms_of(secret: str) -> list[str]:
    raw = secret.encode()
    return [secret, raw.hex(), base64.b64encode(raw).decode().rstrip("="), base64.b64encode(b"x" + raw).decode()[4:-4]]


def read_all(folder: Path) -> list[str]:
    """The trace's file and those of its large parts."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    assert len(files) > 1, "nothing was large enough to lie apart"
    return [file.read_text() for file in files]


async def test_no_secret_is_in_a_trace_in_its_parts_or_in_what_is_made_of_it(
    traces: Path, stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {
        name: f"canary/{name}-{secrets.token_hex(8)}"
        for name in ("OPENAI_API_KEY", "TOOLCREW_BRAVE_API_KEY", "TOOLCREW_SECRETS_PREVIOUS")
    }
    for name, value in known.items():
        monkeypatch.setenv(name, json.dumps([value]) if name.endswith("PREVIOUS") else value)
    password = urlsplit(stack.redis_url).password or ""
    # Given by hand: the environment names no Redis.
    monkeypatch.delenv("TOOLCREW_REDIS_URL")
    shaped = ["ghp_" + "a1B2" * 9, "AKIA" + "Q7" * 8]
    said = " ".join([*known.values(), password, *shaped])
    leaks = (
        f"cat <<'E'\n{said}\nE\necho -n {shlex.quote(said)} | tee /dev/stderr | base64 -w0; echo -n "
        f"{shlex.quote(password)} | od -An -tx1 | tr -d ' \\n'; seq 9000"
    )
    turns = [
        Calls([("bash_tool", {"command": leaks})], f"I say {said}"),
        Calls([("write_tool", {"file_path": said[:40], "content": said * 200})]),
        said,
    ]
    async with ToolClient.connect(stack.redis_url) as client:
        path = await run_traced(client, turns)
        report = await replay_in(client, path)
        assert [one.state for one in report.calls] == ["unfit", "unfit"]
    trace = load_trace(path)
    made: list[Any] = [
        build_atif(trace),
        build_openai(trace),
        build_traj(trace),
        build_otel(trace, with_content=True),
        build_json(trace),
    ]
    texts = [
        *map(json.dumps, made),
        build_page(trace),
        "\n".join(build_lines(trace, is_full=True)),
        json.dumps(report.to_json()),
    ]
    texts += read_all(traces)
    assert all("[masked: " in text for text in texts[:6])
    leaked = [
        secret
        for secret in [*known.values(), password, *shaped]
        if any(form in text for form in forms_of(secret) for text in texts)
    ]
    assert leaked == []
