"""Skills of an operator's folder on a real stack: listed everywhere, loaded, read, and their scripts run in the session's sandbox."""

import json
import os
from pathlib import Path

import pytest
from docker import APIClient

from contract.calls import ToolResult
from contract.errors import ErrorCode
from orchestrator.client import ToolClient
from orchestrator.sessions import Session
from tests.skill_ground import SHIPPED, write_skill
from tests.stack import open_stack, run_toolcrew

pytestmark = [pytest.mark.stack, pytest.mark.timeout(200)]

ECHO = """#!/usr/bin/env python3
import json, os, sys
print(json.dumps({"args": json.load(sys.stdin), "cwd": os.getcwd(), "beside": open(os.environ["SKILL_DIR"] + "/data/word.txt").read()}))
"""


async def use(session: Session, **arguments: object) -> ToolResult:
    return await session.call("skill_tool", arguments)


async def test_skills_are_listed_loaded_read_and_run(engine: APIClient, tmp_path: Path) -> None:
    scripts = {
        "scripts/echo.py": ECHO,
        "scripts/slow.sh": "echo begun; sleep 300",
        "scripts/loud.sh": "head -c 3000000 /dev/zero | tr '\\0' 'x'",
        "scripts/ruby.sh": "#!/usr/bin/env ruby\nputs 1",
        "scripts/fails.sh": "echo no >&2; exit 3",
        "scripts/plain": "no program",
        "data/word.txt": "found",
    }
    echo = write_skill(tmp_path, "echo", files=scripts)
    (echo / "scripts" / "plain").chmod(0o644)
    write_skill(tmp_path, "broken", front="description: of nothing")
    with open_stack(engine, {"TOOLCREW_SKILLS": os.pathsep.join(map(str, (tmp_path, SHIPPED)))}) as stack:
        assert "skill_not_loaded" in stack.log("worker")
        listed = run_toolcrew(stack.footprint, "skills", "ls", "--json", environment={"TOOLCREW_REDIS_URL": stack.redis_url})
        assert [row["name"] for row in json.loads(listed.stdout)] == ["echo", "word-count"]
        async with ToolClient.connect(stack.redis_url) as client, await client.open_session() as session:
            assert [skill.name for skill in await client.skills()] == ["echo", "word-count"]
            assert "- echo: Does echo." in next(spec for spec in await client.tools() if spec.name == "skill_tool").description

            assert "- word-count: Counts" in (await use(session, action="list")).text()
            loaded = (await use(session, name="echo")).text()
            assert "Do it." in loaded
            assert "- data/word.txt (5 bytes)" in loaded
            assert (await use(session, name="echo", action="read", path="data/word.txt")).text().startswith("1\tfound\n")

            ran = await use(session, name="echo", action="run", script="echo.py", args={"a": ["ü", 1]})
            assert json.loads(ran.text()) == {"args": {"a": ["ü", 1]}, "cwd": "/workspace", "beside": "found"}
            await session.write_file("a.txt", b"one two two\n")
            counted = await use(session, name="word-count", action="run", script="scripts/count.py", args={"files": ["a.txt"]})
            assert json.loads(counted.text())["a.txt"]["top"] == [["two", 2], ["one", 1]]
            # Brought there once: what the session does to its own copy stays.
            await session.call("bash_tool", {"command": "echo changed > .toolcrew/skills/echo-*/data/word.txt"})
            again = await use(session, name="echo", action="run", script="echo.py")
            assert json.loads(again.text())["beside"] == "changed\n"
            made = await session.call("bash_tool", {"command": "ls -A .toolcrew/skills | wc -l"})
            assert made.text() == "2\n"

            slow = await use(session, name="echo", action="run", script="slow.sh", timeout=2)
            assert (slow.error_code, slow.output) == (ErrorCode.TIMEOUT, "begun\n")
            loud = await use(session, name="echo", action="run", script="loud.sh")
            assert loud.success
            assert loud.truncated
            assert len(loud.text()) < 40_000
            failed = await use(session, name="echo", action="run", script="fails.sh")
            assert failed.text() == "no\n[exit code 3]"
            no_program = await use(session, name="echo", action="run", script="ruby.sh")
            assert (no_program.error_code, "no ruby" in no_program.text()) == (ErrorCode.FILE_NOT_FOUND, True)
            plain = await use(session, name="echo", action="run", script="plain")
            assert (plain.error_code, "run bit" in plain.text()) == (ErrorCode.INVALID_ARGUMENTS, True)

            # Each session has a copy of its own.
            async with await client.open_session() as other:
                told = await use(other, name="echo", action="run", script="echo.py")
                assert json.loads(told.text())["beside"] == "found"
                (echo / "data" / "word.txt").write_text("later")
            async with await client.open_session() as late:
                refused = await use(late, name="echo", action="run", script="echo.py")
                assert (refused.error_code, "changed since" in refused.text()) == (ErrorCode.STALE_FILE, True)


async def test_without_the_setting_there_is_no_skill_tool(engine: APIClient) -> None:
    with open_stack(engine) as stack:
        async with ToolClient.connect(stack.redis_url) as client:
            assert "skill_tool" not in [spec.name for spec in await client.tools()]
            assert await client.skills() == ()
