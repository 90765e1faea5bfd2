"""Measure a call of a tool of another MCP server over stdio.

The server is either kept by the session or started for each call. The baseline is bash_tool on the same stack.
"""

import asyncio
import json
import tempfile
from pathlib import Path

from benchmarks.processes import environment
from benchmarks.report import Report, interleave, median
from benchmarks.sizes import size
from benchmarks.whole_path import awaited, whole_call
from toolcrew import ToolClient
from toolcrew.orchestrator.sessions.session import Session

ROUNDS, WARM_UP, FIRSTS = size((100, 10, 10), (2, 1, 1))
SERVER = """
import json, sys
for line in sys.stdin:
    request = json.loads(line)
    tools = [{"name": "nothing", "inputSchema": {"type": "object"}}]
    versions = {"supportedVersions": ["2026-07-28"]}
    results = {"server/discover": versions, "tools/list": {"tools": tools}, "tools/call": {"content": []}}
    if "id" in request:
        print(json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": results[request["method"]]}), flush=True)
"""
"""Source of a minimal MCP server in Python."""


def run(rounds: int = ROUNDS) -> Report:
    entry = {"command": "python3", "args": ["-c", SERVER], "network": "none"}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "servers.json"
        file.write_text(json.dumps({"mcpServers": {"kept": entry, "anew": {**entry, "idle_s": 0}}}))
        with environment({"TOOLCREW_MCP_SERVERS": str(file)}):
            return asyncio.run(_run(rounds))


async def _run(rounds: int) -> Report:
    report = Report(
        "mcp_servers",
        notes=[f"medians of {rounds} interleaved rounds, in one open session; first calls: of {FIRSTS} sessions"],
    )
    async with ToolClient.embedded(workers_only=True) as client:
        async with await client.open_session() as session, await client.open_session() as alone:
            cases = {
                "alone": awaited(lambda: whole_call(alone)),
                "bash": awaited(lambda: whole_call(session)),
                "kept": awaited(lambda: _call(session, "kept")),
                "anew": awaited(lambda: _call(session, "anew")),
            }
            seconds = await interleave(cases, rounds, WARM_UP)
        first = [await _first(client) for _ in range(FIRSTS)]
    middle = {name: median(values) for name, values in seconds.items()}
    report.add_ms("bash", seconds["bash"], "bash_tool true")
    report.add(
        "kept_server_ratio",
        middle["bash"] / middle["alone"],
        "the same / in a session that keeps no server",
        at_most=1.1,
    )
    report.add_ms("kept", seconds["kept"], "a tool of a server that the session keeps")
    report.add_ms("anew", seconds["anew"], "a tool of a server that is started for the call")
    report.add_ms("first", first, "the first call of a server that is then kept")
    report.add("kept_ratio", middle["kept"] / middle["bash"], "kept / bash_tool", at_most=2.0)
    report.add("anew_ratio", middle["anew"] / middle["bash"], "anew / bash_tool")
    return report


async def _call(session: Session, server: str) -> None:
    result = await session.call(f"mcp__{server}__nothing", {})
    if not result.success:
        raise RuntimeError(f"the call did not succeed: {result.error}")


async def _first(client: ToolClient) -> float:
    async with await client.open_session() as session:
        await whole_call(session)
        return await awaited(lambda: _call(session, "kept"))()
