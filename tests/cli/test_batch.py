"""`toolcrew batches` on a pool without workers: the checks before anything is queued, and the list of batches."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from tests.conftest import RedisProcess
from tests.support.records.builders import build_spec
from toolcrew.contract.specs import Catalog
from toolcrew.contract.webhooks import Webhook
from toolcrew.orchestrator.command import app
from toolcrew.orchestrator.runs.batches import run_id
from toolcrew.store.batches import batch_key
from toolcrew.store.webhooks import DueNotice, open_webhook

Toolcrew = Callable[..., Result]


@pytest.fixture
def toolcrew(redis_server: RedisProcess, monkeypatch: pytest.MonkeyPatch) -> Toolcrew:
    """Run the command on a pool with a worker that is never called."""
    monkeypatch.setenv("TOOLCREW_REDIS_URL", redis_server.url)
    monkeypatch.setenv("COLUMNS", "400")
    redis_server.publish_catalog(Catalog(tools=(build_spec("session.open", audience="session"),)))
    runner = CliRunner()
    return lambda *arguments: runner.invoke(app, ["batches", *map(str, arguments)])


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    """Return three items. The last item requests a file."""
    file = tmp_path / "in.jsonl"
    items: list[dict[str, Any]] = [{"id": f"i{number}", "instruction": "act"} for number in range(3)]
    file.write_text("".join(json.dumps(item) + "\n" for item in items))
    return file


def as_json(result: Result) -> Any:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def message_of(result: Result) -> str:
    """Return the message in one line. A usage error has a box that breaks lines."""
    return " ".join(result.stderr.replace("│", " ").split())


def build_row(number: int, batch: str, kind: str | None = None) -> str:
    run = run_id("default", batch, f"i{number}")
    error = {"code": "MAX_ITERATIONS", "message": "no", "kind": kind} if kind is not None else None
    response = (
        {"status_code": 200, "request_id": run, "body": {"answer": "yes", "usage": {"prompt_tokens": 7}}}
        if kind is None
        else None
    )
    return json.dumps({"id": run, "custom_id": f"i{number}", "response": response, "error": error}) + "\n"


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ((), "give --output OUT.jsonl, or --detach"),
        (("--detach", "--errors", "e.jsonl"), "--errors needs --output"),
        (("--output", "o.jsonl", "--prices", "cheap"), "--prices is not IN/OUT"),
        (("--output", "o.jsonl", "--max-wall", "0"), "--max-wall must be greater than 0"),
        (("--detach", "--webhook", "https://example.org/ended"), "--webhook-secret"),
        (("--output", "o.jsonl", "--webhook", "https://example.org/", "--webhook-secret", "s"), "needs --detach"),
        (("--output", "o.jsonl", "--dialect", "latin"), "--dialect latin is unknown: use native, tags, json or auto"),
    ],
)
def test_an_invalid_flag_is_refused_before_the_file_is_read(
    flags: tuple[str, ...], sentence: str, toolcrew: Toolcrew, tmp_path: Path
) -> None:
    (tmp_path / "bad.jsonl").write_text("no JSON\n")
    result = toolcrew("submit", tmp_path / "bad.jsonl", *flags)
    assert (result.exit_code, result.stdout) == (2, "")
    assert sentence in message_of(result)


def test_a_missing_input_file_is_reported_before_other_errors(toolcrew: Toolcrew) -> None:
    result = toolcrew("submit", "not-there.jsonl", "--errors", "e.jsonl")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "the input file not-there.jsonl does not exist: check the path" in message_of(result)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ({"artifacts": ["out/**"]}, "line 1 names artifacts"),
        ({"limits": {"max_cost": 1}}, "line 1: `limits.max_cost` needs"),
    ],
)
def test_a_line_that_requires_a_flag_is_refused_without_it(
    line: dict[str, Any], sentence: str, toolcrew: Toolcrew, tmp_path: Path
) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text(json.dumps({"id": "a", "instruction": "act", **line}) + "\n")
    text = toolcrew("submit", file, "--output", tmp_path / "o.jsonl")
    assert (text.exit_code, sentence in text.stderr) == (1, True)


@pytest.mark.parametrize("command", ["list", "show b", "export b", "show --logs b", "cancel b", "resume b"])
def test_batch_commands_without_redis_start_no_local_stack(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TOOLCREW_REDIS_URL", raising=False)
    result = CliRunner().invoke(app, ["batches", *command.split(), "--json"])
    assert result.exit_code == 1
    assert "TOOLCREW_REDIS_URL is not set" in json.loads(result.stdout)["error"]["message"]


def test_batches_are_listed_newest_first_and_shown(toolcrew: Toolcrew, lines: Path) -> None:
    assert toolcrew("list").stdout == "no batch was submitted in the last 30 days\n"
    for name in ("first", "second"):
        assert toolcrew("submit", lines, "--detach", "--id", name, "--concurrency", 3).stdout == f"{name}\n"
    listed = as_json(toolcrew("list", "--json"))
    assert listed["next_cursor"] is None
    reply = listed["batches"]
    assert [one["id"] for one in reply] == ["second", "first"]
    assert reply[0] == {"tenant": "default", **as_json(toolcrew("show", "second", "--json"))}
    assert reply[0]["request_counts"] == {"total": 3, "completed": 0, "failed": 0, "waiting": 3, "running": 0}
    assert (reply[0]["concurrency"], reply[0]["rows"], reply[0]["name"]) == (3, None, "in.jsonl")
    assert [line.split()[1] for line in toolcrew("list").stdout.splitlines()] == ["id", "second", "first"]
    assert "items       3 total, 0 completed, 0 failed, 3 waiting, 0 running" in toolcrew("show", "first").stdout
    assert as_json(toolcrew("list", "--tenant", "other", "--json"))["batches"] == []


def test_submit_stores_a_sealed_webhook(
    toolcrew: Toolcrew, lines: Path, tmp_path: Path, redis_server: RedisProcess
) -> None:
    secret, url = "whsec_" + "a" * 32, "https://example.org/ended"
    (tmp_path / "secret").write_text(secret + "\n")
    flags = ("--detach", "--id", "b", "--webhook-secret", tmp_path / "secret", "--webhook")
    assert toolcrew("submit", lines, *flags, "ftp://example.org").exit_code == 2
    assert toolcrew("submit", lines, *flags, url).exit_code == 0
    with redis_server.client() as client:
        sealed = client.hget(batch_key("default", "default", "b"), "webhook")
    assert sealed is not None
    notice = DueNotice("default", "batch", "b", sealed.decode(), 1, "")
    assert open_webhook(redis_server.keys, notice) == Webhook(url=url, secret=secret)


def test_a_batch_that_redis_lost_is_not_listed(toolcrew: Toolcrew, lines: Path, redis_server: RedisProcess) -> None:
    toolcrew("submit", lines, "--detach", "--id", "old")
    with redis_server.client() as client:
        client.delete(batch_key("default", "default", "old"))
        assert as_json(toolcrew("list", "--json"))["batches"] == []
        assert client.exists("toolcrew:default:t:default:batch-ids") == 0


def test_a_cancelled_batch_has_a_row_for_every_item(toolcrew: Toolcrew, lines: Path) -> None:
    toolcrew("submit", lines, "--detach", "--id", "b")
    assert as_json(toolcrew("cancel", "b", "--json")) == {"id": "b", "not_begun": 3}
    rows = [json.loads(line) for line in toolcrew("export", "b").stdout.splitlines()]
    assert {(one["custom_id"], one["error"]["kind"]) for one in rows} == {
        (f"i{number}", "cancelled") for number in range(3)
    }
    out = lines.with_name("o.jsonl")
    assert as_json(toolcrew("export", "b", "--output", out, "--json")) == {"id": "b", "rows": 3}
    assert (out.read_text(), len(lines.with_name("o.errors.jsonl").read_text().splitlines())) == ("", 3)


def test_resume_does_not_recreate_a_removed_output_file(toolcrew: Toolcrew, lines: Path) -> None:
    out = lines.with_name("o.jsonl")
    toolcrew("submit", lines, "--detach", "--id", "b", "--output", out)
    rows = as_json(toolcrew("show", "b", "--json"))["rows"]
    assert (rows["output"], rows["errors"]) == (str(out), str(lines.with_name("o.errors.jsonl")))
    out.unlink()
    result = toolcrew("resume", "b")
    assert (result.exit_code, "give --output" in result.stderr, out.exists()) == (1, True, False)


def test_an_item_with_a_row_does_not_run_again(toolcrew: Toolcrew, lines: Path) -> None:
    out, errors = lines.with_name("o.jsonl"), lines.with_name("o.errors.jsonl")
    out.write_text(build_row(0, "b"))
    errors.write_text(build_row(1, "b", "model") + build_row(2, "b", "infrastructure"))
    assert toolcrew("submit", lines, "--detach", "--id", "b", "--output", out).exit_code == 0
    status = as_json(toolcrew("show", "b", "--json"))
    assert (status["request_counts"]["completed"], status["failed"]) == (1, {"model": 1})
    assert status["request_counts"]["waiting"] == 1
    assert json.loads(toolcrew("export", "b").stdout.splitlines()[0])["response"]["body"]["answer"] == "yes"
    reply = [json.loads(line) for line in toolcrew("show", "--logs", "b", "--json").stdout.splitlines()][-1]
    assert (reply["done"], reply["failed"], reply["prompt_tokens"]) == (1, 1, 7)


def test_an_incomplete_submission_is_not_resumed(toolcrew: Toolcrew, lines: Path, redis_server: RedisProcess) -> None:
    out = lines.with_name("o.jsonl")
    toolcrew("submit", lines, "--detach", "--id", "b", "--output", out)
    with redis_server.client() as client:
        client.rpop(batch_key("default", "default", "b") + ":items")
    result = toolcrew("resume", "b")
    assert (result.exit_code, "only 2 of the 3 lines of batch b were queued" in result.stderr) == (1, True)


def test_a_detached_batch_requires_redis(lines: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TOOLCREW_REDIS_URL", raising=False)
    text = CliRunner().invoke(app, ["batches", "submit", str(lines), "--detach"])
    assert (text.exit_code, "set TOOLCREW_REDIS_URL, or leave --detach out" in text.stderr) == (1, True)


def test_items_cancelled_before_their_start_are_reported_as_cancelled(toolcrew: Toolcrew, lines: Path) -> None:
    toolcrew("submit", lines, "--detach", "--id", "b")
    toolcrew("cancel", "b")
    for follow in ((), ("-f",)):
        reply = [json.loads(line) for line in toolcrew("show", "--logs", "b", "--json", *follow).stdout.splitlines()]
        ends = {one["item"]: one["failure"]["kind"] for one in reply if one["type"] == "RunEnded"}
        assert ends == dict.fromkeys(("i0", "i1", "i2"), "cancelled")
        assert (reply[-1]["failed"], reply[-1]["queued"], reply[-1]["has_ended"]) == (3, 0, True)
    assert (
        "Z  i0 failed (cancelled CANCELLED): the batch was cancelled before this item started\n"
        in toolcrew("show", "--logs", "b").stdout
    )


def test_an_artifact_folder_that_cannot_be_created_is_reported(toolcrew: Toolcrew, lines: Path) -> None:
    text = toolcrew("submit", lines, "--output", lines.with_name("o.jsonl"), "--artifacts", lines / "inside")
    assert (text.exit_code, "give another folder with --artifacts" in text.stderr) == (1, True)


def test_resume_of_a_batch_without_output_requires_one(toolcrew: Toolcrew, lines: Path) -> None:
    toolcrew("submit", lines, "--detach", "--id", "b")
    result = toolcrew("resume", "b")
    assert (result.exit_code, "give --output OUT.jsonl" in result.stderr) == (1, True)


def test_a_retry_of_an_unknown_failure_kind_is_refused(toolcrew: Toolcrew) -> None:
    result = toolcrew("resume", "b", "--retry", "all,model")
    assert (result.exit_code, "--retry: unknown kind" in message_of(result)) == (2, True)


def test_an_invalid_batch_id_creates_no_output_file(toolcrew: Toolcrew, lines: Path) -> None:
    text = toolcrew("submit", lines, "--output", lines.with_name("o.jsonl"), "--id", "a/b")
    assert (text.exit_code, "1 to 64 letters" in text.stderr) == (1, True)
    assert not lines.with_name("o.jsonl").exists()
