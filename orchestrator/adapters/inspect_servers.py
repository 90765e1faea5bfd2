"""Servers that Inspect's tools keep in a sandbox. A call ends all processes that it started, so a background job starts
the server and keeps it until the session ends.
"""

import asyncio
import shlex

from inspect_ai.tool._sandbox_tools_utils._legacy_helpers import LEGACY_SANDBOX_CLI
from inspect_ai.util import ExecResult
from inspect_ai.util._sandbox._cli import SANDBOX_CLI, SANDBOX_TOOLS_DIR

from toolcrew.contract.calls import ToolResult
from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.orchestrator.adapters.inspect_users import run_as
from toolcrew.orchestrator.sessions.session import Session

_START_TIMEOUT_S = 120.0
_POLL_S = 0.1
_PARENT, _, _LEAF = SANDBOX_TOOLS_DIR.rpartition("/")
_WRITABLE_PARENT = "/tmp"
BROWSER_REQUEST = [LEGACY_SANDBOX_CLI, "exec"]
START_BROWSER = [
    "/bin/sh",
    "-c",
    """folder=$(mktemp -d) || exit
cat >"$folder/sitecustomize.py" <<'END' || exit
import os
umask = os.umask
os.umask = lambda mask: umask(0o022 if mask == 0o111 else mask)
END
PYTHONPATH=$folder exec inspect-tool-support exec '{"jsonrpc": "2.0", "method": "no_method", "id": 1}'
""",
]
"""Command that starts the server of the web browser. Each request starts it if necessary; this one does no more.

The server sets a umask of 0111, so that all users can connect to its socket. Its browser then makes folders which it
cannot enter, unless it may override the rights of files. In a sandbox all requests come from one user.
"""


def is_server_start(cmd: list[str]) -> bool:
    """Return whether the command starts the server of Inspect's tools, which must outlive its call."""
    return cmd in ([SANDBOX_CLI, "start-server"], move_tools([SANDBOX_CLI, "start-server"], b"")[0])


def move_tools(cmd: list[str], stdin: bytes) -> tuple[list[str], bytes]:
    """Return the command and its input with another folder for Inspect's tools, which Inspect installs below /var/tmp.
    Only root of a sandbox can write there.
    """
    folder = f"{_WRITABLE_PARENT}/{_LEAF}"
    if _LEAF in cmd:
        return [_WRITABLE_PARENT if part == _PARENT else part for part in cmd], stdin
    if cmd[:1] == [SANDBOX_CLI]:
        return [f"{folder}{cmd[0].removeprefix(SANDBOX_TOOLS_DIR)}", *cmd[1:]], stdin.replace(
            SANDBOX_TOOLS_DIR.encode(), folder.encode()
        )
    return cmd, stdin


async def start_server(session: Session, user: str, cmd: list[str]) -> ExecResult[str]:
    """Run a command as a background job, and return its result when it has ended. The processes that it leaves behind
    continue. Raises ToolFailure.
    """
    command = shlex.join(run_as(user, cmd))
    job = _check(await session.call("bash_tool", {"command": command, "background": True}))
    output = job.output or ""
    async with asyncio.timeout(_START_TIMEOUT_S):
        while job.metadata["exit_code"] is None and job.metadata["signal"] is None:
            await asyncio.sleep(_POLL_S)
            job = _check(await session.call("bash_tool", {"action": "poll", "job_id": job.metadata["job_id"]}))
            output += job.output or ""
    code = job.metadata["exit_code"]
    code = code if isinstance(code, int) else 128
    return ExecResult(success=code == 0, returncode=code, stdout="", stderr="" if code == 0 else output)


def _check(result: ToolResult) -> ToolResult:
    if not result.success:
        raise ToolFailure(result.error_code or ErrorCode.INTERNAL, result.error or "")
    return result
