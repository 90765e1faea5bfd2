"""`toolcrew batch` under failures, as users type it: invalid files, unwritable paths, full disks, unavailable models,
and quotas.
"""

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.batches.test_batches import SCRIPT, Shell, answers, expected
from tests.model_server.running import running_model_server
from tests.support.cli.command_server import run_toolcrew
from tests.support.stack.stack import TOOLCREW, Footprint, Stack, missing
from tests.support.stack.waiting import wait_until
from toolcrew.orchestrator.operations.ports import reserve_port

pytestmark = pytest.mark.stack

NO_RETRIES = {"TOOLCREW_MODEL_RETRIES": "0"}
"""A failed model request is reported at once; the retries of the batch follow."""


class RunningCommand:
    """A running command, and its stderr output so far."""

    def __init__(
        self,
        shell: "CommandShell",
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        prefix: tuple[str, ...] = (),
    ) -> None:
        self._path = shell.folder / "stderr.txt"
        with self._path.open("wb") as errors:
            self.process = subprocess.Popen(
                [*prefix, TOOLCREW, *arguments],
                env=shell.footprint.environment({**shell.environment, **NO_RETRIES, **(environment or {})}),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
            )
        shell.begun.append(self.process)

    def output(self) -> str:
        return self._path.read_text(errors="replace")

    def wait_for(self, text: str) -> None:
        wait_until(lambda: text in self.output() or self.process.poll() is not None, 90, self.output)
        assert text in self.output()

    def end(self) -> int:
        return self.process.wait(150)


class CommandShell(Shell):
    def __init__(self, stack: Stack, footprint: Footprint, server: Any, folder: Path) -> None:
        super().__init__(stack, footprint, server, folder)
        self.footprint = footprint
        self.out = str(folder / "out.jsonl")
        self.begun: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "CommandShell":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.begun:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def run(self, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
        return run_toolcrew(
            self.footprint, *arguments, environment={**self.environment, **NO_RETRIES, **environment}, within_s=150
        )

    def batch_events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.rows("out.events.jsonl") if event["type"] == kind]

    def counts(self, batch: str) -> dict[str, int]:
        counts: dict[str, int] = json.loads(self.run("batches", "show", batch, "--json").stdout)["request_counts"]
        return counts


@pytest.fixture
def shell(stack: Stack, footprint: Footprint, tmp_path: Path) -> Iterator[CommandShell]:
    with running_model_server(SCRIPT) as server, CommandShell(stack, footprint, server, tmp_path) as shell:
        yield shell


def fault(kind: str, **fields: Any) -> dict[str, Any]:
    """Return a fault line of the model server's script."""
    when: dict[str, Any] = {name: fields.pop(name) for name in ("first", "per", "during_s") if name in fields}
    return {"kind": "fault", "fault": {"kind": kind, **fields}, **when}


def test_an_invalid_file_is_reported_line_by_line_and_nothing_is_submitted(shell: CommandShell) -> None:
    lines = [
        b"\xef\xbb\xbf" + json.dumps({"id": "a", "instruction": "fine"}).encode() + b"\r",
        b'{"id": "b", "instruction": "x"',
        b'{"id": "c", "instruction": "\0"}',
        b'{"id": "d", "instruction": "\\ud800"}',
        b'{"id": "e", "x": NaN, "instruction": "x"}',
        b'{"id": "f", "id": "g", "instruction": "x"}',
        b'{"id": "h", "x": ' + b"[" * 10_000 + b"]" * 10_000 + b"}",
        b'{"id": "a", "instruction": "again"}',
        b'{"id": "i", "instruction": "x", "workspace": "missing.tar.gz"}',
        b'{"custom_id": "j", "method": "POST", "url": "/v1/agent/runs", "body": {"instruction": "x"}}',
    ]
    file = shell.folder / "in.jsonl"
    file.write_bytes(b"\n".join(lines))
    done = shell.run("batches", "submit", str(file), "--output", shell.out, "--id", "wrong")
    assert (done.returncode, done.stdout, Path(shell.out).exists()) == (1, "", False)
    assert re.findall(r"^  line (\d+)", done.stderr, re.MULTILINE) == [str(number) for number in range(2, 11)], (
        done.stderr
    )
    assert shell.run("batches", "show", "wrong").returncode == 1


def test_an_output_file_with_other_content_is_refused_and_unchanged(shell: CommandShell) -> None:
    file = shell.write(1)
    before = file.read_bytes()
    done = shell.run("batches", "submit", str(file), "--output", str(file), "--id", "same")
    assert (done.returncode, file.read_bytes()) == (1, before)
    assert "line 1 of" in done.stderr
    assert "was not changed" in done.stderr
    row = {"id": "r", "custom_id": "i0", "response": None, "error": None}
    Path(shell.out).write_text(json.dumps(row) + "\n")
    done = shell.run("batches", "submit", str(file), "--output", shell.out, "--id", "same")
    assert done.returncode == 1
    assert "contains a row of another batch" in done.stderr
    assert shell.run("batches", "show", "same").returncode == 1


def test_a_full_disk_delays_rows_and_loses_none(shell: CommandShell) -> None:
    disk = shell.folder / "disk"
    disk.mkdir()
    script = (
        'mount -t tmpfs -o size=512k none "$0" || exit 99; '
        'head -c 499712 /dev/zero >"$0/ballast"; "$@"; code=$?; cp "$0"/out.*jsonl "$0"/..; exit $code'
    )
    in_namespace = ("unshare", *(["--map-root-user"] if os.geteuid() else []), "--mount", "sh", "-c", script, str(disk))
    if subprocess.run([*in_namespace, "true"], capture_output=True, check=False).returncode == 99:
        missing("no file system can be mounted here")
    arguments = (
        "batches",
        "submit",
        str(shell.write(24)),
        "--output",
        str(disk / "out.jsonl"),
        "--id",
        "full",
        "--concurrency",
        "6",
    )
    result = RunningCommand(shell, *arguments, prefix=in_namespace)
    result.wait_for("free space on its disk")
    Path(f"/proc/{result.process.pid}/root{disk}/ballast").unlink()
    assert result.end() == 0, result.output()
    assert answers(shell.rows()) == expected(24)
    assert shell.rows("out.errors.jsonl") == []


def test_a_batch_waits_while_its_model_is_unavailable_and_repeats_no_reply(
    stack: Stack, footprint: Footprint, tmp_path: Path
) -> None:
    script = [*SCRIPT, fault("status", status=503, retry_after=1, during_s=[2, 8])]
    with running_model_server(script) as server, CommandShell(stack, footprint, server, tmp_path) as shell:
        text = RunningCommand(
            shell,
            "batches",
            "submit",
            str(shell.write(16)),
            "--output",
            shell.out,
            "--id",
            "away",
            "--concurrency",
            "4",
        )
        assert text.end() == 0, text.output()
        stats = server.stats()
    assert answers(shell.rows()) == expected(16)
    assert stats["replies_repeated"] == 0
    # The items that ran at the failure, and now and then an item that tests whether the model is back.
    assert 4 <= stats["faults"]["status"] <= 8
    assert shell.batch_events("item_retried") == []
    assert "the batch waits for its model" in text.output()
    assert "the model answers again" in text.output()


def test_a_batch_whose_model_is_unreachable_can_be_interrupted_and_resumed(shell: CommandShell) -> None:
    port = reserve_port()
    shell.environment["OPENAI_BASE_URL"] = f"http://127.0.0.1:{port}/v1"
    text = RunningCommand(
        shell, "batches", "submit", str(shell.write(6)), "--output", shell.out, "--id", "gone", "--concurrency", "3"
    )
    text.wait_for("the batch waits for its model")
    text.process.send_signal(signal.SIGINT)
    assert text.end() == 130
    assert "toolcrew batches resume gone" in text.output()
    counts = shell.counts("gone")
    assert (counts["failed"], counts["waiting"], counts["running"]) == (0, 6, 0)
    with running_model_server(SCRIPT, port=port):
        done = shell.run("batches", "resume", "gone", "--output", shell.out)
    assert done.returncode == 0, done.stderr
    assert answers(shell.rows()) == expected(6)


def test_a_refused_model_key_stops_the_batch_and_fails_no_item(shell: CommandShell) -> None:
    arguments = (
        "batches",
        "submit",
        str(shell.write(20)),
        "--output",
        shell.out,
        "--id",
        "refused",
        "--concurrency",
        "2",
    )
    with running_model_server([*SCRIPT, fault("status", status=401)]) as server:
        done = shell.run(*arguments, **server.environment())
        requests = server.stats()["requests"]
    assert done.returncode == 1
    assert "check OPENAI_API_KEY" in done.stderr
    assert "toolcrew batches resume refused" in done.stderr
    # Each of the two runs sends its request, and then at most one without content.
    assert requests <= 4
    counts = shell.counts("refused")
    assert (counts["failed"], counts["waiting"], counts["running"]) == (0, 20, 0)
    # The sandboxes are kept for a resumed batch. Without a resume they are removed.
    assert shell.run("batches", "cancel", "refused").returncode == 0


def test_tenant_quotas_make_a_batch_wait_and_fail_no_item(shell: CommandShell) -> None:
    shell.run("tenants", "add", "small", "--sandboxes", "2", "--in-flight", "1", "--queued", "1")
    try:
        done = shell.run(
            *(
                "batches",
                "submit",
                str(shell.write(5)),
                "--output",
                shell.out,
                "--id",
                "quota",
                "--concurrency",
                "5",
                "--tenant",
                "small",
            )
        )
    finally:
        shell.run("tenants", "remove", "small")
    assert done.returncode == 0, done.stderr
    assert answers(shell.rows()) == expected(5)
    assert shell.batch_events("item_retried") == []
    assert "tenant small has reached its limit of 2 open sessions" in done.stderr
