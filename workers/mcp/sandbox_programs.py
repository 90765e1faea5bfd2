"""Source code of the programs that run inside a sandbox for MCP servers."""

import functools
import hashlib
import shlex
from pathlib import Path

from toolcrew.workers.mcp.settings import StdioEntry


@functools.cache
def read_driver() -> str:
    return _read("sandbox_driver") + "\nmain()\n"


@functools.cache
def read_visit() -> str:
    return _read("sandbox_visit") + "\nmain()\n"


def name_driver_socket(entry: StdioEntry) -> str:
    """Return the socket name of the daemon for an entry of the server file. Each entry and each version of the driver
    has its own name.
    """
    fields_json = entry.model_dump_json(include={"command", "args", "cwd", "network", "idle_s"})
    env = repr(sorted((name, value.get_secret_value()) for name, value in entry.env.items()))
    return "toolcrew-mcp-" + hashlib.sha256("\0".join((fields_json, env, read_driver())).encode()).hexdigest()[:32]


def build_driver_script(python: str, entry: StdioEntry) -> str:
    """Return the shell script that starts the daemon of an entry's server."""
    return "exec " + shlex.join([python, "-I", "-c", read_driver(), name_driver_socket(entry), f"{entry.idle_s:g}"])


def _read(name: str) -> str:
    return Path(__file__).with_name(f"{name}.py").read_text()
