"""Skills of an operator's folder on a real stack. Skills are listed everywhere, loaded and read, and their scripts
run in the session's sandbox.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from docker import APIClient

from tests.support.cli.command_server import run_toolcrew
from tests.support.records.skill_harness import SHIPPED, write_skill
from tests.support.stack.stack import Stack, open_stack
from toolcrew.contract.calls import ToolResult
from toolcrew.contract.errors import ErrorCode
from toolcrew.contract.skill_sidecars import SIDECAR_FILE
from toolcrew.orchestrator.approvals import CallbackApprover
from toolcrew.orchestrator.approvals.approvers import ApprovalRequest
from toolcrew.orchestrator.models.scripted import Calls, ScriptedModel
from toolcrew.orchestrator.sdk.client import ToolClient
from toolcrew.orchestrator.sessions.session import Session
from toolcrew.workers.skills.loader import load_skill

pytestmark = pytest.mark.stack

ECHO = """#!/usr/bin/env python3
import json, os, sys
place = os.environ["SKILL_DIR"]
print(json.dumps({"args": json.load(sys.stdin), "cwd": os.getcwd(), "beside": open(place + "/data/word.txt").read(), "folder": place}))
"""


KEEP_HOUSE = "name: keep-house\ndescription: Tidies up.\nallowed-tools: Bash(git clean:*)"


SHOUT = """#!/usr/bin/env python3
import json, sys
print(json.load(sys.stdin)["text"].upper(), "{0}")
"""
SHOUT_TOOL = {
    "entrypoint": "scripts/run.py",
    "parameters": {
        "type": "object",
        "properties": {"text": {"type": "string", "pattern": "^(a+)+$"}},
        "required": ["text"],
    },
}
ECHO_TOOL = {
    "entrypoint": "scripts/echo.py",
    "parameters": {
        "type": "object",
        "properties": {"word": {"type": "string"}},
        "required": ["word"],
        "additionalProperties": False,
    },
    "timeout": 60,
}
SAY_TOOL = {**ECHO_TOOL, "args": "argv", "interpreter": "bash", "entrypoint": "scripts/say.sh", "timeout": 8}
SCRIPTS = {
    "scripts/echo.py": ECHO,
    "scripts/slow.sh": "echo begun; sleep 300",
    "scripts/loud.sh": "head -c 3000000 /dev/zero | tr '\\0' 'x'",
    "scripts/ruby.sh": "#!/usr/bin/env ruby\nputs 1",
    "scripts/fails.sh": "echo no >&2; exit 3",
    "scripts/plain": "no program",
    "data/word.txt": "found",
}
NAMES = [
    "bash_tool", "changed", "echo", "keep-house", "late", "loud", "repeat", "say", "table-profile", "vector-search",
    "word-count",
]  # fmt: skip
"""The skills of the operator's folders, in order."""


def write_shout_skill(root: Path, name: str, by: str) -> Path:
    return write_skill(root, name, files={"scripts/run.py": SHOUT.format(by), SIDECAR_FILE: json.dumps(SHOUT_TOOL)})


@pytest.fixture(scope="module")
def system_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the operator's folder of the shared stack. The stack also has the shipped skills."""
    folder = tmp_path_factory.mktemp("system")
    echo = write_skill(folder, "echo", files=SCRIPTS)
    (echo / "scripts" / "plain").chmod(0o644)
    write_skill(folder, "late", files={"scripts/run.sh": "echo everybodys"})
    write_skill(folder, "changed", files={"scripts/run.sh": "echo first"})
    write_skill(folder, "broken", front="description: of nothing")
    write_skill(folder, "keep-house", KEEP_HOUSE)
    write_shout_skill(folder, "loud", "everybodys")
    write_skill(
        folder,
        "repeat",
        files={"scripts/echo.py": ECHO, "data/word.txt": "found", SIDECAR_FILE: json.dumps(ECHO_TOOL)},
    )
    say = 'echo "$@"; [ "$1" != --word=wait ] || sleep 300'
    write_skill(folder, "say", files={"scripts/say.sh": say, SIDECAR_FILE: json.dumps(SAY_TOOL)})
    write_skill(
        folder,
        "bash-tool",
        front="name: bash_tool\ndescription: Not ours.",
        files={"scripts/echo.py": ECHO, SIDECAR_FILE: json.dumps(ECHO_TOOL)},
    )
    return folder


@pytest.fixture(scope="module")
def stack(engine: APIClient, system_folder: Path) -> Iterator[Stack]:
    with open_stack(engine, {"TOOLCREW_SKILLS": f"{system_folder}{os.pathsep}{SHIPPED}"}) as opened:
        yield opened


async def call_skill_tool(session: Session, **arguments: object) -> ToolResult:
    return await session.call("skill_tool", arguments)


async def test_skills_are_listed_loaded_read_and_run(stack: Stack, system_folder: Path) -> None:
    assert "skill_not_loaded" in stack.log("worker")
    listed = run_toolcrew(
        stack.footprint, "skills", "list", "--json", environment={"TOOLCREW_REDIS_URL": stack.redis_url}
    )
    assert [row["name"] for row in json.loads(listed.stdout)["skills"]] == NAMES
    async with ToolClient.connect(stack.redis_url) as client, await client.open_session() as session:
        assert [skill.name for skill in await client.skills()] == NAMES
        assert (
            "- echo: Does echo." in next(spec for spec in await client.tools() if spec.name == "skill_tool").description
        )

        assert "- word-count: Counts" in (await call_skill_tool(session, action="list")).text()
        loaded = (await call_skill_tool(session, name="echo")).text()
        assert "Do it." in loaded
        assert "- data/word.txt (5 bytes)" in loaded
        assert (
            (await call_skill_tool(session, name="echo", action="read", path="data/word.txt"))
            .text()
            .startswith("1\tfound\n")
        )

        result = await call_skill_tool(session, name="echo", action="run", script="echo.py", args={"a": ["ü", 1]})
        reply = json.loads(result.text())
        assert (reply["args"], reply["cwd"], reply["beside"]) == ({"a": ["ü", 1]}, "/workspace", "found")
        await session.write_file("a.txt", b"one two two\n")
        counted = await call_skill_tool(
            session, name="word-count", action="run", script="scripts/count.py", args={"files": ["a.txt"]}
        )
        assert json.loads(counted.text())["a.txt"]["top"] == [["two", 2], ["one", 1]]
        await session.write_file("notes/roses.md", b"Roses are cut in spring.\n")
        search = await session.call("vector-search", {"query": "when do I cut a rose"})
        assert json.loads(search.text())["results"][0]["path"] == "notes/roses.md"
        await session.call("bash_tool", {"command": "rm -r notes .toolcrew"})
        # The session cannot change the folder of the skill.
        folder = json.loads(result.text())["folder"]
        tried = await session.call(
            "bash_tool",
            {"command": f"echo changed > {folder}/data/word.txt; rm -rf {folder}; cat {folder}/data/word.txt"},
        )
        assert tried.text().endswith("found")
        assert "Read-only file system" in tried.text()
        listing = await session.call("bash_tool", {"command": "ls -A /workspace; ls /skills"})
        assert listing.output == "a.txt\nls: cannot open directory '/skills': Permission denied\n[exit code 2]"

        slow = await call_skill_tool(session, name="echo", action="run", script="slow.sh", timeout=2)
        assert (slow.error_code, slow.output) == (ErrorCode.TIMEOUT, "begun\n")
        loud = await call_skill_tool(session, name="echo", action="run", script="loud.sh")
        assert loud.success
        assert loud.truncated
        assert len(loud.text()) < 40_000
        failed = await call_skill_tool(session, name="echo", action="run", script="fails.sh")
        assert failed.output == "no\n[exit code 3]"
        no_program = await call_skill_tool(session, name="echo", action="run", script="ruby.sh")
        assert (no_program.error_code, "ruby could not be started" in no_program.text()) == (
            ErrorCode.FILE_NOT_FOUND,
            True,
        )
        plain = await call_skill_tool(session, name="echo", action="run", script="plain")
        assert (plain.error_code, "no execute permission" in plain.text()) == (ErrorCode.INVALID_ARGUMENTS, True)

        # Later changes of the files on the host have no effect, because the content is fixed when the skill is
        # loaded.
        (system_folder / "echo" / "data" / "word.txt").write_text("later")
        async with await client.open_session() as other:
            reply = await call_skill_tool(other, name="echo", action="run", script="echo.py")
            assert json.loads(reply.text())["beside"] == "found"
            (system_folder / "changed" / "scripts" / "run.sh").write_text("echo second")
            refused = await call_skill_tool(other, name="changed", action="run", script="run.sh")
            assert (refused.error_code, "changed since" in refused.text()) == (ErrorCode.STALE_FILE, True)


async def test_a_skill_with_a_sidecar_file_is_a_tool(stack: Stack) -> None:
    assert "skill_name_taken" in stack.log("worker")
    async with ToolClient.connect(stack.redis_url) as client, await client.open_session() as session:
        specs = {spec.name: spec for spec in await client.tools()}
        assert specs["repeat"].parameters == ECHO_TOOL["parameters"]
        assert specs["bash_tool"].description != "Not ours."
        result = await session.call("repeat", {"word": "ü"})
        assert json.loads(result.text())["args"] == {"word": "ü"}
        assert (await session.call("say", {"word": "a b"})).text() == "--word=a b\n"
        refused = await session.call("repeat", {"world": "x"})
        assert refused.error_code is ErrorCode.INVALID_ARGUMENTS
        late = await session.call("say", {"word": "wait"})
        assert (late.error_code, late.output) == (ErrorCode.TIMEOUT, "--word=wait\n")


async def test_tools_allowed_by_a_trusted_skill_need_no_approval_after_the_run_loaded_it(
    stack: Stack, system_folder: Path
) -> None:
    digest = load_skill(system_folder / "keep-house").summary.digest
    clean, requested = ("bash_tool", {"command": "git clean -fd"}), list[str]()

    def refuse(request: ApprovalRequest) -> bool:
        requested.append(str(request.call.arguments["command"]))
        return False

    environment = {"TOOLCREW_REDIS_URL": stack.redis_url}
    run_toolcrew(stack.footprint, "tenants", "set", "default", "--trust-skill", digest, environment=environment)
    async with ToolClient.connect(stack.redis_url, approver=CallbackApprover(refuse)) as client:
        steps = [
            Calls([clean]),
            Calls([("keep-house", {})]),
            Calls([clean]),
            Calls([("bash_tool", {"command": "git reset --hard"})]),
        ]
        result = await client.run("tidy up", model=ScriptedModel([*steps, "done"]), tools=["bash_tool", "skill_tool"])
        text = next(spec for spec in await client.tools() if spec.name == "skill_tool").description
    assert result.answer == "done"
    assert requested == ["git clean -fd", "git reset --hard"]
    assert "- keep-house: Tidies up." in text


async def test_a_skill_installed_for_a_tenant_is_visible_to_that_tenant_only(stack: Stack, tmp_path: Path) -> None:
    own = tmp_path / "own"
    write_skill(own, "private", files={"scripts/echo.py": ECHO, "data/word.txt": "secret of acme"})
    write_skill(own, "late", files={"scripts/run.sh": "echo ours"})
    run = {"action": "run", "script": "echo.py"}
    environment = {"TOOLCREW_REDIS_URL": stack.redis_url}
    for name in ("private", "late"):
        run_toolcrew(stack.footprint, "skills", "install", str(own / name), "--tenant", "acme", environment=environment)
    async with (
        ToolClient.connect(stack.redis_url, tenant="acme") as acme,
        ToolClient.connect(stack.redis_url, tenant="rival") as rival,
        await acme.open_session() as mine,
        await rival.open_session() as theirs,
    ):
        assert [skill.name for skill in await acme.skills()] == sorted([*NAMES, "private"])
        assert [skill.name for skill in await rival.skills()] == NAMES
        assert (
            "- private: Does private."
            in next(spec for spec in await acme.tools() if spec.name == "skill_tool").description
        )
        reply = json.loads((await call_skill_tool(mine, name="private", **run)).text())
        assert reply["beside"] == "secret of acme"
        assert (await call_skill_tool(mine, name="late", action="run", script="run.sh")).text() == "ours\n"

        refused = await call_skill_tool(theirs, name="private", **run)
        assert (refused.error_code, "acme" in refused.text()) == (ErrorCode.FILE_NOT_FOUND, False)
        assert (await call_skill_tool(theirs, name="late", action="run", script="run.sh")).text() == "everybodys\n"
        assert "private" not in (await call_skill_tool(theirs, action="list")).text()
        looked = await theirs.call("bash_tool", {"command": "ls /skills; ls -R /skills/*"})
        assert "Permission denied" in looked.text()
        assert "word.txt" not in looked.text()

        # A skill that is requested by name gives its instructions; a removed skill is not found.
        steps = [Calls([("private", {})]), "done"]
        model = ScriptedModel(steps)
        assert (await acme.run("go", model=model)).answer == "done"
        assert '<skill name="private">' in str(model.requests[-1].messages)
        assert await (await acme.own_skills()).remove("private")
        missing = await call_skill_tool(mine, name="private", **run)
        assert missing.error_code is ErrorCode.FILE_NOT_FOUND


async def test_a_tenant_skill_is_a_tool_and_is_disabled_with_bash(stack: Stack, tmp_path: Path) -> None:
    environment = {"TOOLCREW_REDIS_URL": stack.redis_url}
    for name in ("shout", "loud", "read_tool"):
        path = str(write_shout_skill(tmp_path, name, "ours"))
        run_toolcrew(stack.footprint, "skills", "install", path, "--tenant", "bolt", environment=environment)
    listed = run_toolcrew(stack.footprint, "skills", "list", "--tenant", "bolt", "--json", environment=environment)
    rows = [row for row in json.loads(listed.stdout)["skills"] if row["source"] == "tenant"]
    assert [(row["name"], row["tool"], row["hides_system"]) for row in rows] == [
        ("loud", "yes", True),
        ("read_tool", "name taken", False),
        ("shout", "yes", False),
    ]
    async with (
        ToolClient.connect(stack.redis_url, tenant="bolt") as bolt,
        ToolClient.connect(stack.redis_url, tenant="rival") as rival,
        await bolt.open_session() as mine,
        await rival.open_session() as theirs,
    ):
        tools = {spec.name: spec for spec in await bolt.tools()}
        assert {"shout", "loud", "read_tool"} <= tools.keys()
        assert tools["read_tool"].description != tools["shout"].description
        # Shared processes do not evaluate patterns of a tenant.
        assert tools["shout"].parameters["properties"] == {"text": {"type": "string"}}
        assert "shout" not in {spec.name for spec in await rival.tools()}

        result = await mine.call("shout", {"text": "hi"})
        assert (result.success, result.name, result.text()) == (True, "shout", "HI ours\n")
        assert (await mine.call("loud", {"text": "hi"})).text() == "HI ours\n"
        assert (await theirs.call("loud", {"text": "aa"})).text() == "AA everybodys\n"
        missing = await theirs.call("shout", {"text": "hi"})
        assert (missing.error_code, missing.error) == (ErrorCode.TOOL_NOT_FOUND, "Tool not found: shout")
        wrong = await mine.call("shout", {"words": "hi"})
        assert (wrong.error_code, wrong.name) == (ErrorCode.INVALID_ARGUMENTS, "shout")
        by_tool = await call_skill_tool(mine, name="shout", action="run", args={"text": "hi"})
        assert by_tool.text() == "HI ours\n"
        wrong = await call_skill_tool(mine, name="shout", action="run", args={"text": 1})
        assert (wrong.error_code, "text" in wrong.text()) == (ErrorCode.INVALID_ARGUMENTS, True)
        # Content of a session is not examined, and replaces no tool.
        await mine.write_file(".skills/shout/SKILL.md", b"---\nname: shout\ndescription: Hijacks.\n---\n")
        assert (await mine.call("shout", {"text": "hi"})).text() == "HI ours\n"

        model = ScriptedModel([Calls([("shout", {"text": "run"})]), "done"])
        assert (await bolt.run("go", model=model)).answer == "done"
        assert "RUN ours" in str(model.requests[-1].messages)

        for off in ("shout", "bash_tool", "skill_tool"):
            await bolt.disable(off, tenant="bolt")
            assert "shout" not in {spec.name for spec in await bolt.tools()}
            assert (await mine.call("shout", {"text": "hi"})).error_code is ErrorCode.TOOL_DISABLED
            await bolt.enable(off, tenant="bolt")
        assert await (await bolt.own_skills()).remove("shout")
        assert (await mine.call("shout", {"text": "hi"})).error_code is ErrorCode.TOOL_NOT_FOUND


async def test_skills_in_the_workspace_of_a_session_take_precedence(stack: Stack) -> None:
    front = "---\nname: {0}\ndescription: Does {0} here.\n---\nDo it.\n"
    async with (
        ToolClient.connect(stack.redis_url) as client,
        await client.open_session() as mine,
        await client.open_session() as other,
    ):
        for name in ("late", "own"):
            await mine.write_file(f".skills/{name}/SKILL.md", front.format(name).encode())
        await mine.write_file(
            ".skills/own/scripts/run.py",
            b"#!/usr/bin/env python3\nimport os, sys\nprint(os.environ['SKILL_DIR'], sys.stdin.read())\n",
        )
        await mine.write_file(".skills/late/scripts/run.sh", b"echo ours\n")
        theirs = (await call_skill_tool(other, action="list")).text().splitlines()
        ours = (await call_skill_tool(mine, action="list")).text().splitlines()
        assert [line.split()[1].rstrip(":") for line in theirs] == NAMES
        changes = {"- late: Does late here.", "- own: Does own here."}
        assert (set(ours) - set(theirs), set(theirs) - set(ours)) == (changes, {"- late: Does late."})
        loaded = await call_skill_tool(mine, name="own")
        assert "- scripts/run.py" in loaded.text()
        assert "digest" not in loaded.metadata
        result = await call_skill_tool(mine, name="own", action="run", script="run.py", args={"a": 1})
        assert result.text() == '/workspace/.skills/own {"a": 1}\n'
        assert (await call_skill_tool(mine, name="late", action="run", script="run.sh")).text() == "ours\n"
        assert (await call_skill_tool(other, name="late", action="run", script="run.sh")).text() == "everybodys\n"
        assert (await call_skill_tool(other, name="own")).error_code is ErrorCode.FILE_NOT_FOUND

        # Only regular files of the folder belong to the skill.
        await mine.call(
            "bash_tool",
            {"command": "ln -s /etc/passwd .skills/own/link; mkfifo .skills/own/pipe; ln -s /etc .skills/etc"},
        )
        assert "link" not in (await call_skill_tool(mine, name="own")).text()
        assert (
            await call_skill_tool(mine, name="own", action="read", path="link")
        ).error_code is ErrorCode.FILE_NOT_FOUND
        for name in ("../../etc", "etc", ".", "own/scripts"):
            assert (await call_skill_tool(mine, name=name)).error_code is ErrorCode.FILE_NOT_FOUND
        await mine.call("bash_tool", {"command": "head -c 20000000 /dev/zero >.skills/own/big"})
        large = await call_skill_tool(mine, name="own")
        assert (large.error_code, "larger than the 16 MiB" in large.text()) == (ErrorCode.INVALID_ARGUMENTS, True)
        await mine.write_file(".skills/own/SKILL.md", b"no front matter")
        await mine.call("bash_tool", {"command": "rm .skills/own/big"})
        assert "is not a valid skill: it has no front matter" in (await call_skill_tool(mine, name="own")).text()
