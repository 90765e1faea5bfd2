"""A batch with a recorded model gives the same answers from the recording, streamed or whole. The recording contains
no key.
"""

import json
from pathlib import Path

import pytest

from tests.model_server.running import ModelServer, running_model_server
from tests.support.cli.command_server import run_toolcrew
from tests.support.stack.stack import Footprint, Stack

pytestmark = pytest.mark.stack
KEY = "sk-canary-0123456789-abcdef"
SCRIPT = [
    {
        "kind": "rule",
        "when": {"step": 0},
        "reply": {
            "text": "I count.",
            "calls": [{"name": "bash_tool", "arguments": {"command": "seq {{item}} | wc -l"}}],
        },
    },
    {"kind": "rule", "reply": {"text": f"{{{{observation|strip}}}} lines, and my key is {KEY}", "chunk_chars": 5}},
]


@pytest.mark.parametrize("streaming", ["true", "false"])
def test_a_replayed_recording_gives_the_same_answers_and_contains_no_key(
    stack: Stack, footprint: Footprint, tmp_path: Path, streaming: str
) -> None:
    lines = [{"id": f"i{number}", "instruction": f"[item {number}] count"} for number in (3, 12)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def answers(server: ModelServer, name: str) -> dict[str, str]:
        places = {
            "TOOLCREW_REDIS_URL": stack.redis_url,
            "TOOLCREW_TRACES": str(tmp_path / "traces"),
            "TOOLCREW_MODEL_STREAMING": streaming,
        }
        environment = {**places, **server.environment(), "OPENAI_API_KEY": KEY}
        out = tmp_path / f"{name}.jsonl"
        done = run_toolcrew(
            footprint, "batches", "submit", str(tmp_path / "in.jsonl"), "--output", str(out), environment=environment
        )
        assert done.returncode == 0, done.stderr
        rows = [json.loads(line) for line in out.read_text().splitlines()]
        return {row["custom_id"]: row["response"]["body"]["answer"] for row in rows}

    pairs = tmp_path / "pairs.jsonl"
    with (
        running_model_server(SCRIPT) as real,
        running_model_server(options=["--record", real.url, "--to", str(pairs)]) as recorder,
    ):
        recorded = answers(recorder, "recorded")
    assert recorded == {f"i{number}": f"{number} lines, and my key is {KEY}" for number in (3, 12)}
    assert KEY not in pairs.read_text()
    with running_model_server(options=["--replay", str(pairs)]) as player:
        played = answers(player, "played")
        stats = player.stats()
    assert played == {item: answer.replace(KEY, "[secret]") for item, answer in recorded.items()}
    assert (stats["replies"], stats["refused"]) == (4, 0)
