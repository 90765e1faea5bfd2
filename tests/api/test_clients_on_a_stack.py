"""The clients of the HTTP API, with nothing but a URL and a key, on real workers and sandboxes."""

import asyncio
import io
import re
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.stack.api_stack import ApiStack
from tests.support.stack.waiting import SOON_S, wait_until, wait_until_async
from toolcrew import (
    ApiUnavailable,
    AsyncClient,
    BatchOptions,
    Client,
    ErrorCode,
    ItemEnvironment,
    RunBody,
    ToolFailure,
)
from toolcrew.contract.errors import ConfigError
from toolcrew.contract.run_spec import RunLimits
from toolcrew.contract.session_spec import SandboxOptions

pytestmark = pytest.mark.stack


@pytest.fixture
def client(api_stack: ApiStack) -> Iterator[Client]:
    with Client(api_stack.apis[0].url, api_stack.keys["acme"]) as opened:
        yield opened


def test_a_synchronous_program_uses_a_session(client: Client, tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.txt").write_text("one\n")
    with client.sessions.open(tmp_path, ttl_s=600, options=SandboxOptions(hostname="box")) as session:
        assert session.run("cat src/a.txt; hostname; export X=1; cd src").text().startswith("one\nbox\n")
        assert session.run("pwd; echo $X").output == "/workspace/src\n1\n"
        session.files.write("new/b.bin", bytes(range(256)))
        session.files.write("/tmp/c d é.txt", "text é")
        assert session.files.read("/workspace/new/b.bin") == bytes(range(256))
        assert session.run("cat '/tmp/c d é.txt'").output == "text é"
        assert session.info().tenant == "acme"
        assert session.id in [found.id for found in client.sessions.list()]
        out = tmp_path / "out"
        assert session.export(out, "new") == []
        assert (out / "b.bin").read_bytes() == bytes(range(256))
        (fork,) = session.fork()
        with fork:
            assert fork.run("cat a.txt; echo >forked").output == "one\n"
        assert session.run("ls").output == "a.txt\n"
        checkpoint = session.checkpoint()
    with pytest.raises(ToolFailure) as closed:
        session.info()
    assert closed.value.code is ErrorCode.SESSION_NOT_FOUND
    with client.sessions.open(restore=checkpoint) as restored:
        assert restored.files.read("src/a.txt") == b"one\n"


def test_a_program_runs_without_a_shell_and_returns_bytes(client: Client) -> None:
    with client.sessions.open() as session:
        argv = ["sh", "-c", 'cat; printf "\\377$A" >&2; pwd; exit 3']
        done = session.exec(argv, stdin=b"in\0\xff", env={"A": "b"}, cwd="/tmp", timeout_s=20)
        assert (done.returncode, done.stdout, done.stderr) == (3, b"in\0\xff/tmp\n", b"\xffb")
        large = session.exec(["head", "-c", str(5 * 1024 * 1024), "/dev/zero"])
        assert large.truncated
        assert large.stdout == bytes(4 * 1024 * 1024)
        slow = session.exec(["sleep", "60"], timeout_s=0.5)
        assert (slow.timed_out, slow.returncode) == (True, -15)
        with pytest.raises(ToolFailure) as refused:
            session.exec(["no-such-program"])
        assert refused.value.code is not ErrorCode.INTERNAL


async def test_output_arrives_while_the_tool_runs(api_stack: ApiStack) -> None:
    pieces: list[str] = []

    async def on_output(stream: str, text: str) -> None:
        pieces.append(text)

    async with (
        AsyncClient(api_stack.apis[1].url, api_stack.keys["acme"]) as client,
        await client.sessions.open() as session,
    ):
        await session.exec(["mkfifo", "ready"])
        running = asyncio.ensure_future(session.run("echo first; read line <ready; echo $line", on_output=on_output))
        await wait_until_async(lambda: "".join(pieces) == "first\n", SOON_S, "the first line arrived")
        assert not running.done()
        await session.exec(["sh", "-c", "echo go >ready"])
        result = await running
    assert result.output == "first\ngo\n"
    assert "".join(pieces) == result.output


async def test_a_cancelled_program_ends_its_call_and_its_exec(api_stack: ApiStack) -> None:
    async with (
        AsyncClient(api_stack.apis[0].url, api_stack.keys["acme"]) as client,
        await client.sessions.open() as session,
    ):

        async def count() -> int:
            done = await session.exec(
                ["sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -c 'sleep 3[0]0' || true"]
            )
            return int(done.stdout)

        async def is_over() -> bool:
            return await count() == 0

        for start in (lambda: session.run("sleep 300"), lambda: session.exec(["sleep", "300"], timeout_s=300)):
            running: asyncio.Future[Any] = asyncio.ensure_future(start())
            await wait_until_async(count, SOON_S, "the program runs")
            running.cancel()
            await wait_until_async(is_over, SOON_S, "the program has ended")


def test_results_of_tools_and_errors_are_those_of_the_direct_client(api_stack: ApiStack, client: Client) -> None:
    with client.sessions.open() as session:
        unknown = session.call("bash_tol", {})
        assert (unknown.success, unknown.error_code) == (False, ErrorCode.TOOL_NOT_FOUND)
        assert session.run("exit 4").metadata["exit_code"] == 4
        with pytest.raises(ToolFailure) as missing:
            session.files.read("missing.txt")
        assert missing.value.code is ErrorCode.FILE_NOT_FOUND
        with Client(client.url, api_stack.keys["rival"]) as rival:
            stolen = rival.sessions.get(session.id)
            for attempt in (
                lambda: stolen.exec(["id"]),
                lambda: stolen.run("id"),
                lambda: stolen.files.read("x"),
                lambda: stolen.fork(),
                lambda: stolen.close(),
                lambda: stolen.export(Path("never")),
            ):
                with pytest.raises(ToolFailure) as foreign:
                    attempt()
                assert foreign.value.code is ErrorCode.SESSION_NOT_FOUND
        with pytest.raises(ToolFailure) as wrong, Client(client.url, "tc_wrong") as stranger:
            stranger.key()
        assert wrong.value.code is ErrorCode.UNAUTHENTICATED
    assert client.key().tenant == "acme"
    assert "bash_tool" in [tool.name for tool in client.tools()]
    assert client.usage().tenant == "acme"


def test_a_run_is_started_followed_and_read(client: Client) -> None:
    body = RunBody(instruction="[item steps]", limits=RunLimits(max_iterations=8))
    run = client.runs.start(body, idempotency_key="once", metadata={"a": "b"})
    assert client.runs.start(body, idempotency_key="once", metadata={"a": "b"}).id == run.id
    kinds = [event for _, event in client.runs.follow(run.id)]
    assert '"RunEnded"' in kinds[-1]
    ended = client.runs.wait(run.id)
    assert (ended.state.value, ended.answer) == ("succeeded", "4 steps")
    assert client.runs.transcript(run.id)[0]["role"] == "system"
    assert run.id in [found.id for found in client.runs.list()]
    with client.sessions.open() as session:
        session.files.write("mine.txt", "x")
        inside = client.runs.start("[item globs]", environment=ItemEnvironment(session=session.id))
        assert client.runs.wait(inside.id).session == session.id
        slept = client.runs.start("[item sleeps]", environment=ItemEnvironment(session=session.id))
        wait_until(lambda: client.runs.get(slept.id).state.value == "running", SOON_S, "the run is running")
        assert client.runs.cancel(slept.id).id == slept.id
        assert client.runs.wait(slept.id).state.value == "cancelled"


def test_a_batch_is_submitted_and_its_rows_are_read(client: Client, tmp_path: Path) -> None:
    lines = [{"id": f"line-{n}", "instruction": "[item hello]"} for n in range(3)]
    batch = client.batches.submit(lines, BatchOptions(name="three", concurrency=2))
    ended = client.batches.wait(batch.id)
    assert (ended.status, ended.request_counts.completed, ended.name) == ("completed", 3, "three")
    assert sorted(row["custom_id"] for row in client.batches.results(batch.id)) == ["line-0", "line-1", "line-2"]
    assert batch.id in [found.id for found in client.batches.list()]
    client.batches.delete(batch.id)
    with pytest.raises(ToolFailure) as bad:
        client.batches.submit([{"id": "x"}])
    assert bad.value.code is ErrorCode.INVALID_ARGUMENTS


def test_files_are_uploaded_and_downloaded(client: Client, tmp_path: Path) -> None:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        entry = tarfile.TarInfo("src/a.txt")
        entry.size = 3
        archive.addfile(entry, io.BytesIO(b"abc"))
    stored = client.files.upload(content.getvalue())
    assert stored.id in [file.id for file in client.files.list()]
    client.files.download(stored.id, tmp_path / "copy.tar")
    assert (tmp_path / "copy.tar").read_bytes() == content.getvalue()
    client.files.delete(stored.id)


def test_a_client_of_threads_shares_its_connections(client: Client) -> None:
    with client.sessions.open() as session:
        outputs: list[str | None] = []
        threads = [
            threading.Thread(target=lambda n=n: outputs.append(session.run(f"echo {n}").output)) for n in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(outputs, key=str) == ["0\n", "1\n", "2\n", "3\n"]


def test_an_address_without_a_service_is_named() -> None:
    began = time.monotonic()
    with pytest.raises(ApiUnavailable, match=r"127\.0\.0\.1:9"), Client("http://127.0.0.1:9", "tc_key") as client:
        client.key()
    assert time.monotonic() - began < 60


def test_the_program_of_the_readme_needs_a_url_and_a_key(api_stack: ApiStack, tmp_path: Path) -> None:
    readme = (Path(__file__).parent.parent.parent / "README.md").read_text()
    [program] = [code for code in re.findall(r"```python\n(.*?)```", readme, re.DOTALL) if "Client()" in code]
    environment = {"TOOLCREW_URL": api_stack.apis[0].url, "TOOLCREW_API_KEY": api_stack.keys["acme"]}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=SOON_S
    )
    assert done.stderr == ""
    assert done.stdout == "42\n\nsum.py\nLinux\nTrue\nHello.\n"


def test_a_batch_uploads_the_files_of_its_lines(client: Client, tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.txt").write_text("in the folder")
    lines = [{"id": name, "instruction": "[item carries]", "workspace": "project"} for name in ("one", "two")]
    batch = client.batches.submit(lines, files={"project": tmp_path})
    assert client.batches.wait(batch.id).request_counts.completed == 2
    rows = list(client.batches.results(batch.id))
    assert len([row for row in rows if "in the folder" in str(row)]) == 2, rows
    with pytest.raises(ConfigError):
        client.batches.submit(lines, files={"other": tmp_path})


def test_a_client_lists_and_kills_calls_and_deletes_checkpoints(client: Client) -> None:
    with client.sessions.open() as session:
        assert session.call("bash_tool", {"command": "true"}, call_id=f"done-{session.id}").success
        assert client.calls.get(f"done-{session.id}")["state"] == "done"
        assert f"done-{session.id}" in [call["id"] for call in client.calls.list()]
        assert client.calls.kill(f"done-{session.id}")["already_ended"]
        checkpoint = session.checkpoint()
    client.delete_checkpoint(checkpoint)
    with pytest.raises(ToolFailure) as missing:
        client.delete_checkpoint(checkpoint)
    assert missing.value.code is ErrorCode.FILE_NOT_FOUND
    assert [model.name for model in client.models()] == []
    assert list(client.approvals.list()) == []
    assert isinstance([skill.name for skill in client.skills.list()], list)
