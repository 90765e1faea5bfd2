"""Commands that fill, break or close parts of their own sandbox. Each result names the program's own failure, and the
session's next command works.
"""

import dataclasses

import pytest

from tests.integration.test_sessions import assert_usable
from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.orchestrator.sdk.client import ToolClient
from toolcrew.orchestrator.sessions.session import Session

pytestmark = pytest.mark.stack

FILL = "cat /dev/zero > {0}/full; echo x > {0}/more"


@dataclasses.dataclass(frozen=True)
class Edge:
    """A command, the code of its result, a text of its output or error, and a command that repairs the damage."""

    command: str
    code: ErrorCode | None = None
    text: str = ""
    repair: str = "true"


EDGES = {
    "full /tmp": Edge(FILL.format("/tmp"), text="File size limit"),
    "full /dev/shm": Edge(FILL.format("/dev/shm"), text="No space left"),
    "full /output": Edge("cat /dev/zero > /output/full; export A=1", text="not kept"),
    "full workspace": Edge("head -c 300M /dev/zero > full; echo x > more", text="File size limit"),
    "read-only home": Edge("chmod 500 ~; touch ~/x", text="Permission denied"),
    "closed workspace": Edge("mkdir d; cd d; chmod 000 /workspace", repair="chmod 755 /workspace"),
    "removed folder": Edge("mkdir d; cd d; rm -r ../d", text="was removed"),
    "fork bomb": Edge(":(){ :|:& };:", ErrorCode.SECURITY_REFUSED),
    "many processes": Edge("for i in {1..10000}; do sleep 300 & done", ErrorCode.TIMEOUT, "limit"),
    "closed streams": Edge("exec >&- 2>&-; echo hi"),
    "full streams": Edge("exec >/dev/full; echo hi", text="No space left"),
    "kill all": Edge("kill -9 -1", text="SIGKILL"),
    "exit": Edge("exit 3", text="[exit code 3]"),
    "errexit": Edge("set -e; false; echo no", text="[exit code 1]"),
    "nounset": Edge("set -u; echo $nothing", text="unbound variable"),
    "exit trap": Edge("trap 'echo bye' EXIT", text="bye\n"),
    "no PATH": Edge("unset PATH; ls", text="ls: No such file", repair="PATH=/bin; ls"),
    "builtin names": Edge("builtin() { :; }; exit() { :; }; eval() { :; }; trap() { :; }; printf() { :; }; true"),
    "huge variable": Edge("export B=$(head -c 300000 /dev/zero | tr '\\0' b)", text="not kept"),
    "no line end": Edge("printf abc", text="abc"),
    "long output": Edge("head -c 100M /dev/zero | tr '\\0' a", text="aaaa"),
    "binary output": Edge("head -c 3000 /bin/bash", text="not UTF-8"),
    "no descriptors": Edge("ulimit -n 0; ls", text="[exit code 127]"),
}


@pytest.mark.parametrize("edge", EDGES.values(), ids=EDGES.keys())
async def test_a_session_continues_after_a_command_that_damages_its_own_surroundings(
    session: Session, edge: Edge
) -> None:
    result = await session.call("bash_tool", {"command": edge.command}, timeout_s=15 if edge.code else 120)
    assert result.error_code == edge.code, result
    assert edge.text in f"{result.output}{result.error}"
    await session.call("bash_tool", {"command": edge.repair})
    await assert_usable(session)


async def test_a_fork_bomb_that_no_rule_sees_ends_with_its_call(session: Session) -> None:
    script = "printf 'b() { b | b & b; }; b' > bomb.sh; bash bomb.sh 2>/dev/null"
    result = await session.call("bash_tool", {"command": script}, timeout_s=5)
    assert result.error_code in (None, ErrorCode.TIMEOUT), result
    await assert_usable(session)


SETUP = """
mkfifo fifo; ln -s none dangling; ln -s loop loop; mkdir folder closed; touch closed/f; chmod 000 closed
ln -s /dev/zero device; perl -MIO::Socket::UNIX -e 'IO::Socket::UNIX->new(Local => "socket", Listen => 1)'
"""
DENIED = ErrorCode.PATH_NOT_ALLOWED
PATHS = {
    "fifo": DENIED,
    "socket": DENIED,
    "device": DENIED,
    "/dev/null": DENIED,
    "loop": DENIED,
    "closed/f": ErrorCode.PERMISSION_DENIED,
}
CALLS: dict[str, dict[str, str]] = {
    "read_tool": {},
    "write_tool": {"content": "new"},
    "edit_tool": {"old_string": "a", "new_string": "b"},
    "grep_tool": {"pattern": "a"},
    "glob_tool": {"pattern": "*"},
}


async def test_tools_name_the_path_that_is_no_file_or_may_not_be_read(session: Session) -> None:
    await session.call("bash_tool", {"command": SETUP})
    for path, code in PATHS.items():
        for tool, arguments in CALLS.items():
            field = "path" if tool in ("grep_tool", "glob_tool") else "file_path"
            result = await session.call(tool, {field: path, **arguments})
            assert (result.error_code, path in (result.error or "")) == (code, True), (tool, path, result)
    listed = await session.call("read_tool", {"file_path": "closed"})
    assert (listed.error_code, "closed" in (listed.error or "")) == (ErrorCode.PERMISSION_DENIED, True)
    assert (await session.call("read_tool", {"file_path": "folder"})).error_code == ErrorCode.IS_DIRECTORY
    assert (await session.call("read_tool", {"file_path": "dangling"})).error_code == ErrorCode.FILE_NOT_FOUND
    await assert_usable(session)


ENCODED = {
    "latin-1": "café crème, naïve",
    "cp1252": "“quoted” – café",
    "gb18030": "你好世界，这是一个测试文件",
    "shift_jis": "こんにちは、これはテストです",
    "euc_kr": "안녕하세요 이것은 시험 문서입니다",
}


@pytest.mark.parametrize("encoding", ENCODED)
async def test_tools_read_and_change_files_of_other_encodings(session: Session, encoding: str) -> None:
    text = ENCODED[encoding]
    octal = "".join(f"\\{byte:03o}" for byte in f"{text}\n".encode(encoding))
    await session.call("bash_tool", {"command": f"printf '{octal}' > encoded.txt"})
    assert text in (await session.call("read_tool", {"file_path": "encoded.txt"})).output
    change = {"file_path": "encoded.txt", "old_string": text[:2], "new_string": "x"}
    assert (await session.call("edit_tool", change)).success
    named = await session.call("read_tool", {"file_path": "encoded.txt", "encoding": encoding})
    assert f"x{text[2:]}" in named.output


async def test_tools_and_the_shell_mean_the_same_home(session: Session) -> None:
    assert (await session.call("write_tool", {"file_path": "~/notes.txt", "content": "hello\n"})).success
    assert (await session.call("bash_tool", {"command": "cat ~/notes.txt"})).output == "hello\n"


@pytest.mark.parametrize("folder", ["/tmp", "/workspace"])
async def test_a_full_folder_fails_only_the_calls_that_write_there(session: Session, folder: str) -> None:
    await session.call(
        "bash_tool", {"command": f"echo a > {folder}/f; ulimit -f unlimited; cat /dev/zero > {folder}/full"}
    )
    await session.call("bash_tool", {"command": f"cat /dev/zero > {folder}/full2"})
    text = "new\n" * 100_000
    refused = await session.call("write_tool", {"file_path": f"{folder}/new", "content": text})
    assert refused.error_code == ErrorCode.NO_SPACE, refused
    assert (await session.call("bash_tool", {"command": "echo new > /dev/shm/new"})).success
    for tool, arguments in (
        ("read_tool", {"file_path": f"{folder}/f"}),
        ("grep_tool", {"path": f"{folder}/f", "pattern": "a"}),
        ("glob_tool", {"path": folder, "pattern": "*"}),
    ):
        assert (await session.call(tool, arguments)).success
    await assert_usable(session)


async def run_job(session: Session, text: str) -> str:
    """Start a job that prints the text and continues. Return the path of its log."""
    started = await session.call("bash_tool", {"command": f"echo {text}; sleep 300", "background": True})
    assert started.success, started
    logs = await session.call("bash_tool", {"command": f"grep -lx {text} /output/jobs/*"})
    return logs.output.strip()


async def test_forks_and_restored_sessions_read_the_logs_of_earlier_jobs_and_start_new_ones(
    client: ToolClient, session: Session
) -> None:
    log = await run_job(session, "parent")
    with pytest.raises(ToolFailure) as busy:
        await session.fork()
    assert busy.value.code == ErrorCode.SESSION_BUSY

    [child] = await session.fork(leave_jobs=True)
    restored = await client.open_session(restore=await session.checkpoint())

    for continued in (child, restored):
        async with continued:
            assert (await continued.call("bash_tool", {"action": "list"})).output == "(no jobs)"
            polled = await continued.call("bash_tool", {"action": "poll", "job_id": "job-1"})
            assert (polled.error_code, "/output/jobs" in (polled.error or "")) == (ErrorCode.INVALID_ARGUMENTS, True)
            assert await run_job(continued, "first") != log != await run_job(continued, "second")
            assert "parent" in (await continued.call("read_tool", {"file_path": log})).output
    assert "running" in (await session.call("bash_tool", {"action": "list"})).output


async def test_files_in_a_folder_without_read_mode_are_listed(session: Session) -> None:
    await session.call("bash_tool", {"command": "mkdir closed; touch closed/f; ln -s f closed/l; chmod 000 closed"})
    listing = await session.list_files()
    assert sorted(listing.files) == ["closed/f", "closed/l"]
    assert (await session.call("bash_tool", {"command": "stat -c %a closed"})).output == "0\n"
