"""Baseline of the jobs benchmark: a loop without toolcrew, with one bash tool in a plain container."""

import contextlib
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.job_set import Files

MAX_STEPS = 10
REPLY_TOKENS = 512
COMMAND_S = 60
MAX_OUTPUT_CHARS = 4000
_CALL = re.compile(r'<tool_action name="bash_tool"><command value="(.*?)" ?/></tool_action>', re.DOTALL)
_SYSTEM = """\
You are an assistant with a Linux shell. Your only tool is bash_tool: it runs one bash command.
When the user asks for something, first call the tool. Write exactly one line and nothing else:
<tool_action name="bash_tool"><command value="COMMAND" /></tool_action>
Inside COMMAND use single quotes only. When you have the tool result, answer in one plain sentence that repeats the \
result, without a tag.

Example 1:
User: What does /etc/motd say?
Assistant: <tool_action name="bash_tool"><command value="cat /etc/motd" /></tool_action>
User: Tool result:
Welcome to the lab.
Assistant: The file says: Welcome to the lab.

Example 2:
User: Which kernel is this?
Assistant: <tool_action name="bash_tool"><command value="uname -s" /></tool_action>
User: Tool result:
Linux
Assistant: The kernel is Linux."""


@dataclass
class Attempt:
    """Result of one attempt at a job. `files`: the workspace at the end. `error`: why there is no answer."""

    answer: str = ""
    files: Files = field(default_factory=dict)
    tokens_in: int = 0
    tokens_out: int = 0
    calls: int = 0
    seconds: float = 0.0
    error: str | None = None


def attempt(client: httpx.Client, model: str, image: str, instruction: str, files: Files) -> Attempt:
    """Run a job with the model of an OpenAI-compatible API. `client` has the base URL of the API."""
    done, began = Attempt(), time.monotonic()
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": _SYSTEM},
        {"role": "user", "content": instruction},
    ]
    with _open_container(image, files) as (container, folder):
        for _ in range(MAX_STEPS):
            reply = client.post(
                "chat/completions",
                json={"model": model, "messages": messages, "temperature": 0, "seed": 7, "max_tokens": REPLY_TOKENS},
            )
            if reply.status_code != 200:
                done.error = f"HTTP {reply.status_code}: {reply.text[:200]}"
                break
            body = reply.json()
            done.tokens_in += body["usage"]["prompt_tokens"]
            done.tokens_out += body["usage"]["completion_tokens"]
            text = body["choices"][0]["message"]["content"] or ""
            messages.append({"role": "assistant", "content": text})
            call = _CALL.search(text)
            if call is None:
                done.answer = text
                break
            done.calls += 1
            messages.append({"role": "user", "content": f"Tool result:\n{_run(container, call[1])}"})
        else:
            done.error = "step limit"
        done.files = read_files(folder)
    done.seconds = time.monotonic() - began
    return done


def write_files(folder: Path, files: Files) -> None:
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)


def read_files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }


@contextlib.contextmanager
def _open_container(image: str, files: Files) -> Iterator[tuple[str, Path]]:
    """Yield the id of a container without network, and its workspace on this machine."""
    with tempfile.TemporaryDirectory(prefix="toolcrew-bench-") as name:
        folder = Path(name)
        write_files(folder, files)
        # Root has no capabilities in the container and can write only to a folder that root owns.
        limits = ["--user", "0", "--network", "none", "--cap-drop", "ALL", "--memory", "512m", "--pids-limit", "256"]
        mount = ["--volume", f"{folder}:/workspace", "--workdir", "/workspace", "--entrypoint", "sleep"]
        container = _docker("run", "--detach", "--rm", *limits, *mount, image, "3600").stdout.strip()
        try:
            yield container, folder
        finally:
            _docker("rm", "--force", container)


def _run(container: str, command: str) -> str:
    argv = ["timeout", str(COMMAND_S), "bash", "-c", command.replace("&quot;", '"').replace("&amp;", "&")]
    ran = _docker("exec", container, *argv, check=False)
    return (ran.stdout + ran.stderr)[:MAX_OUTPUT_CHARS]


def _docker(*arguments: str, check: bool = True) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        ["docker", *arguments], capture_output=True, text=True, errors="replace", check=check, stdin=subprocess.DEVNULL
    )
