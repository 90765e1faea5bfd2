"""Measure one call of each tool through the whole embedded stack: built-in tools, a skill as a tool, and a tool of an
MCP server.
"""

import asyncio
import contextlib
import itertools
import json
import tempfile
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from benchmarks.loop_step import quiet_log
from benchmarks.mcp_servers import SERVER
from benchmarks.processes import environment
from benchmarks.report import Case, Report, interleave, median, percentile
from benchmarks.sizes import size
from benchmarks.throughput import call_or_raise, until_served
from benchmarks.whole_path import awaited
from toolcrew import ToolClient
from toolcrew.contract.names import BUILTIN_TOOLS
from toolcrew.orchestrator.sessions.session import Session

ROUNDS, WARM_UP = size((1000, 20), (2, 1))
"""Number of rounds and of warm-up rounds. Of 1,000 calls, ten are above the p99."""
SKILL, MCP_TOOL = "word-count", "mcp__small__nothing"
LINES = 200
"""Number of lines of the file that the tools read, search and count."""
PAGE = (
    b"<html><title>A page</title><body><main><h1>A page</h1>"
    + b"<p>Text of a paragraph.</p>" * 50
    + b"</main></body></html>"
)
FOUND = json.dumps({"results": [{"title": "A page", "url": "https://docs.example/page", "content": "Text."}]}).encode()


class _Pages(BaseHTTPRequestHandler):
    """Web server that answers a search like SearXNG, and returns a page for every other path."""

    def do_GET(self) -> None:
        is_search = self.path.startswith("/search")
        body = FOUND if is_search else PAGE
        self.send_response(200)
        self.send_header("content-type", "application/json" if is_search else "text/html; charset=utf-8")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Do nothing: only the report is printed on the terminal."""


def build_calls(port: int, number: int) -> dict[str, Mapping[str, Any]]:
    """Return the arguments of call `number` for each tool. The arguments differ between calls where equal arguments
    would change nothing or be served from a cache.
    """
    return {
        "bash_tool": {"command": "true"},
        "read_tool": {"file_path": "notes.txt"},
        "write_tool": {"file_path": "written.txt", "content": f"version {number}\n"},
        "edit_tool": {
            "file_path": "edited.txt",
            "old_string": f"version {number}.",
            "new_string": f"version {number + 1}.",
        },
        "glob_tool": {"pattern": "*.txt"},
        "grep_tool": {"pattern": "line 1..$", "include": "*.txt"},
        "skill_tool": {"name": SKILL, "action": "run", "script": "count.py", "args": {"files": ["notes.txt"]}},
        "webfetch_tool": {"url": f"http://127.0.0.1:{port}/page{number}"},
        "websearch_tool": {"query": f"query {number}"},
        SKILL: {"files": ["notes.txt"]},
        MCP_TOOL: {},
    }


@contextlib.contextmanager
def serve_pages() -> Iterator[int]:
    """Start a web server on the loopback address and yield its port."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Pages) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def run(rounds: int = ROUNDS) -> Report:
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(serve_pages())
        file = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "servers.json"
        file.write_text(
            json.dumps({"mcpServers": {"small": {"command": "python3", "args": ["-c", SERVER], "network": "none"}}})
        )
        settings = {
            "TOOLCREW_MCP_SERVERS": str(file),
            "TOOLCREW_SEARXNG_URL": f"http://127.0.0.1:{port}",
            "TOOLCREW_WEBFETCH_ALLOW_HOSTS": json.dumps([f"127.0.0.1:{port}"]),
            "TOOLCREW_WEBFETCH_PER_MINUTE": "1000000",
        }
        stack.enter_context(environment(settings))
        stack.enter_context(quiet_log())
        return asyncio.run(_run(rounds, port))


async def _run(rounds: int, port: int) -> Report:
    async with ToolClient.embedded(workers_only=True) as client, await client.open_session() as session:
        await session.write_file("notes.txt", "".join(f"line {number}\n" for number in range(LINES)).encode())
        await session.write_file("edited.txt", b"version 0.\n")
        cases = {name: _build_case(session, name, port) for name in build_calls(port, 0)}
        if missing := BUILTIN_TOOLS - cases.keys():
            raise RuntimeError(f"there is no call for {', '.join(sorted(missing))}: add it to build_calls")
        await until_served(lambda _: call_or_raise(session, MCP_TOOL, {}))
        seconds = await interleave(cases, rounds, WARM_UP)
    report = Report(
        "tools",
        notes=[
            f"{rounds} interleaved rounds, one call at a time, in one open session; pages from the loopback address"
        ],
    )
    for name, values in seconds.items():
        report.add(f"{name}_p50_ms", median(values) * 1000, f"{name}, p50")
        report.add(f"{name}_p99_ms", percentile(values, 0.99) * 1000, f"{name}, p99")
    return report


def _build_case(session: Session, name: str, port: int) -> Case:
    numbers = itertools.count()

    async def call() -> None:
        await call_or_raise(session, name, dict(build_calls(port, next(numbers))[name]))

    return awaited(call)
