"""Measure a call that runs a script of a skill through the whole embedded stack, and the loading of 200 skills.

The baseline of the script is the same script as a command of bash_tool.
"""

import asyncio
import contextlib
import json
import os
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.loop_step import quiet_log
from benchmarks.report import Report, interleave, median
from benchmarks.sizes import size
from benchmarks.tracing import environment
from benchmarks.whole_path import awaited
from toolcrew import ToolClient
from toolcrew.contract.skill_sidecars import SIDECAR_FILE
from toolcrew.orchestrator.dispatch.sessions import Session
from toolcrew.workers.skills.loader import load_skills

ROUNDS, WARM_UP = size((200, 20), (2, 1))
LOADED, LOADS = size((200, 5), (5, 1))
SCRIPT = "read -r line; echo ${#line}\n"


def _write_skill(root: Path, name: str, text: str) -> None:
    folder = root / name
    (folder / "scripts").mkdir(parents=True)
    (folder / "SKILL.md").write_text(f"---\nname: {name}\ndescription: Tells how long a line is.\n---\n{text}\n")
    (folder / "scripts" / "run.sh").write_text(SCRIPT)
    (folder / SIDECAR_FILE).write_text(json.dumps({"entrypoint": "scripts/run.sh"}))


async def _call(session: Session, tool: str, arguments: Mapping[str, Any]) -> None:
    result = await session.call(tool, dict(arguments))
    if not result.success or result.text() != "2\n":
        raise RuntimeError(f"the call did not succeed: {result.text()}")


async def _run_scripts(report: Report) -> None:
    calls: dict[str, tuple[str, dict[str, Any]]] = {
        "bash": ("bash_tool", {"command": SCRIPT, "stdin": "{}\n"}),
        "skill": ("skill_tool", {"name": "line-length", "action": "run", "script": "run.sh"}),
        "named": ("line-length", {}),
    }
    async with contextlib.AsyncExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        _write_skill(root, "line-length", "Run it.")
        with environment({"TOOLCREW_SKILLS": str(root)}):
            client = await stack.enter_async_context(ToolClient.embedded(workers_only=True))
        session = await stack.enter_async_context(await client.open_session())
        cases = {name: awaited(partial(_call, session, *call)) for name, call in calls.items()}
        seconds = await interleave(cases, ROUNDS, WARM_UP)
    bash = median(seconds["bash"])
    report.add_ms("bash", seconds["bash"], "a script of one line as a command of bash_tool")
    report.add("skill_ratio", median(seconds["skill"]) / bash, "the same by skill_tool / by bash_tool", at_most=1.2)
    report.add("named_ratio", median(seconds["named"]) / bash, "as a tool of its own name / by bash_tool", at_most=1.2)


def _load(report: Report) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for number in range(LOADED):
            _write_skill(Path(folder), f"skill-{number}", "text\n" * 200)
        seconds = []
        for _ in range(LOADS):
            began = time.perf_counter()
            if len(load_skills([Path(folder)])) != LOADED:
                raise RuntimeError("not all were loaded")
            seconds.append(time.perf_counter() - began)
    report.add("load_ms", median(seconds) * 1000, f"loading {LOADED} skills", at_most=300.0)


def run() -> Report:
    report = Report("skills")
    with quiet_log():
        asyncio.run(_run_scripts(report))
        _load(report)
    report.notes.append(f"{ROUNDS} interleaved calls each; {os.cpu_count()} cores")
    return report
