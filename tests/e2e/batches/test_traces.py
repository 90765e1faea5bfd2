"""Traces of runs on a real pool: no output that is derived from a trace contains a secret."""

import base64
import json
import secrets
import shlex
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.support.runs.trace_harness import build_lines
from tests.support.stack.stack import Stack
from toolcrew import ToolClient
from toolcrew.orchestrator.cli.trace_printer import build_json
from toolcrew.orchestrator.loop.limits import ReActOptions
from toolcrew.orchestrator.models.scripted import Calls, ScriptedModel
from toolcrew.orchestrator.traces.export_atif import build_atif
from toolcrew.orchestrator.traces.export_otel import build_otel
from toolcrew.orchestrator.traces.page import build_page
from toolcrew.orchestrator.traces.reading import load_trace

pytestmark = pytest.mark.stack


@pytest.fixture
def traces(tmp_path: Path, stack: Stack, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of traces; the environment names the shared stack."""
    folder = tmp_path / "traces"
    for name, value in (("TRACES", str(folder)), ("REDIS_URL", stack.redis_url), ("APPROVALS", "auto")):
        monkeypatch.setenv(f"TOOLCREW_{name}", value)
    return folder


async def run_traced(client: ToolClient, turns: list[Any]) -> Path:
    """Run the turns and return the trace of the run."""
    result = await client.run("go", model=ScriptedModel(turns), options=ReActOptions(max_iterations=9), has_trace=True)
    assert result.stop_reason == "answered"
    return client.traces.folder / client.tenant / f"{result.run}.jsonl"


def forms_of(secret: str) -> list[str]:
    raw = secret.encode()
    return [secret, raw.hex(), base64.b64encode(raw).decode().rstrip("="), base64.b64encode(b"x" + raw).decode()[4:-4]]


def read_all(folder: Path) -> list[str]:
    """Return the text of every file in the folder."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    assert files
    return [file.read_text() for file in files]


async def test_traces_and_their_exports_contain_no_secret(
    traces: Path, stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret_values = {
        name: f"canary/{name}-{secrets.token_hex(8)}"
        for name in ("OPENAI_API_KEY", "TOOLCREW_BRAVE_API_KEY", "TOOLCREW_SECRETS_PREVIOUS")
    }
    for name, value in secret_values.items():
        monkeypatch.setenv(name, json.dumps([value]) if name.endswith("PREVIOUS") else value)
    password = urlsplit(stack.redis_url).password or ""
    # Passed explicitly, because the environment names no Redis.
    monkeypatch.delenv("TOOLCREW_REDIS_URL")
    shaped = ["ghp_" + "a1B2" * 9, "AKIA" + "Q7" * 8]
    prompt = " ".join([*secret_values.values(), password, *shaped])
    leaks = (
        f"cat <<'E'\n{prompt}\nE\necho -n {shlex.quote(prompt)} | tee /dev/stderr | base64 -w0; echo -n "
        f"{shlex.quote(password)} | od -An -tx1 | tr -d ' \\n'; seq 9000"
    )
    turns = [
        Calls([("bash_tool", {"command": leaks})], f"I say {prompt}"),
        Calls([("write_tool", {"file_path": prompt[:40], "content": prompt * 200})]),
        prompt,
    ]
    async with ToolClient.connect(stack.redis_url) as client:
        path = await run_traced(client, turns)
    trace = load_trace(path)
    made: list[Any] = [
        build_atif(trace),
        build_otel(trace, with_content=True),
        build_json(trace),
    ]
    texts = [
        *map(json.dumps, made),
        build_page(trace),
        "\n".join(build_lines(trace, is_full=True)),
    ]
    texts += read_all(traces)
    assert all("[masked: " in text for text in texts[:5])
    leaked = [
        secret
        for secret in [*secret_values.values(), password, *shaped]
        if any(form in text for form in forms_of(secret) for text in texts)
    ]
    assert leaked == []
