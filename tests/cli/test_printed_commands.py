"""Every command that a message recommends exists, and works when the user pastes it."""

import ast
import asyncio
import json
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import redis.asyncio
from click.testing import Result
from typer.core import TyperCommand, TyperGroup
from typer.testing import CliRunner

from tests.conftest import RedisProcess
from tests.support.records.builders import build_spec
from tests.support.runs.batch_events import ended
from tests.support.stack.stack import ROOT
from toolcrew.contract.broker import BrokerSettings
from toolcrew.contract.names import catalog_names_key
from toolcrew.contract.run_events import BatchNotice, FailureKind
from toolcrew.contract.run_spec import RunBody
from toolcrew.contract.session_locations import seal_start
from toolcrew.contract.session_spec import SessionSpec
from toolcrew.contract.specs import Catalog
from toolcrew.contract.tenancy import TenantPolicy
from toolcrew.orchestrator.batches.displays import DisplayedBatch
from toolcrew.orchestrator.batches.progress import BatchProgress
from toolcrew.orchestrator.batches.report import build_report
from toolcrew.orchestrator.command import app, import_all
from toolcrew.orchestrator.runs.durable_runs import DurableRuns
from toolcrew.orchestrator.terminal.commands import build_command
from toolcrew.store.sessions import SessionStore
from toolcrew.store.tenants import RedisTenants

_MARKED = re.compile(r"`(toolcrew [^`]+)`|\((toolcrew [a-z][^()`]*)\)|<code>(toolcrew [^<]+)</code>")
"""Marks of a command in messages and pages."""
SERVERS = {"toolcrew up", "toolcrew serve worker", "toolcrew serve worker --kind web"}
"""These run until they are stopped."""
COMMANDS = import_all()


def find_commands(text: str) -> list[str]:
    return ["".join(command) for command in _MARKED.findall(text)]


def check_command(line: str) -> None:
    """Check a command. Fails if the command does not exist, lacks an argument, or has an unknown option. X may be a
    number.
    """
    argv = ["1" if argument == "X" else argument for argument in shlex.split(line)[1:]]
    command: object = COMMANDS
    while isinstance(command, TyperGroup):
        assert argv, f"`{line}` names a group of commands"
        if argv[0] not in command.commands and not argv[0].startswith("-"):
            pytest.fail(f"`{line}`: there is no command {argv[0]}")
        command = command.commands[argv.pop(0)]
    assert isinstance(command, TyperCommand)
    if argv == ["--help"]:
        return
    command.make_context(line, argv)


def texts_of(path: Path) -> Iterator[str]:
    """Return every text that a module can print, with X for each inserted value. Concatenated texts are one text."""
    tree = ast.parse(path.read_text())
    skipped_nodes: set[ast.AST] = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    skipped_nodes |= {part for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if node in skipped_nodes:
            continue
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@cache
def printed_texts() -> list[tuple[str, str]]:
    """Return every text of a message or a page, with its file."""
    folders = [
        ROOT / package
        for package in ("orchestrator", "contract", "store", "workers", "telemetry", "concurrency", "archives")
    ]
    modules = [(path, text) for folder in folders for path in folder.rglob("*.py") for text in texts_of(path)]
    pages = [(path, re.sub(r"{{.*?}}", "X", path.read_text())) for path in (ROOT / "orchestrator").rglob("*.html")]
    return [(str(path.relative_to(ROOT)), text) for path, text in (*modules, *pages)]


def printed_commands() -> list[tuple[str, str]]:
    return sorted({(path, command) for path, text in printed_texts() for command in find_commands(text)})


def test_every_printed_command_exists() -> None:
    printed = {command for _, command in printed_commands()}
    assert len(printed) > 30
    for command in printed:
        check_command(command)


NO_HINTS = {
    "orchestrator/cli/up.py": "the next steps",
    "orchestrator/terminal/commands.py": "cuts the words off a command",
}
"""File -> what its unmarked commands are."""


def test_every_printed_command_is_marked() -> None:
    """Else the test above would not see it, and a reader would not see where it ends."""
    command = re.compile(rf"toolcrew (?:{'|'.join(COMMANDS.commands)})\b[^\n]*")
    unmarked = {
        (path, option)
        for path, text in printed_texts()
        for option in command.findall(_MARKED.sub("", text))
        if path not in NO_HINTS
    }
    assert unmarked == set()


def test_commands_for_one_tenant_are_built_with_build_command() -> None:
    """Such commands name the tenant, which `build_command` does not forget. A call is found among those of all
    tenants.
    """
    by_hand = re.compile(r"toolcrew (batches|runs|sessions|traces|skills) [a-z]+ [^`]*X")
    missing = {
        (path, command) for path, command in printed_commands() if by_hand.search(command) and "--tenant" not in command
    }
    assert missing == set()


@pytest.mark.parametrize(
    ("argv", "tenant", "command"),
    [
        (("batches", "resume", "t2"), "acme", "toolcrew batches resume t2 --tenant acme"),
        (("batches", "resume", "t2"), "default", "toolcrew batches resume t2"),
        (("traces", "show", "a b'c"), "acme", """toolcrew traces show 'a b'"'"'c' --tenant acme"""),
        (("traces", "show", "$(rm -rf ~)\x1b[2J"), "default", r"toolcrew traces show '$(rm -rf ~)\x1b[2J'"),
    ],
)
def test_build_command_quotes_arguments_and_names_the_tenant(argv: tuple[str, ...], tenant: str, command: str) -> None:
    assert build_command(*argv, tenant=tenant) == command


class Pool:
    """A Redis with the tenant acme and a catalog, and the command on this Redis."""

    def __init__(self, server: RedisProcess) -> None:
        self._environment = {
            "TOOLCREW_REDIS_URL": server.url,
            "COLUMNS": "400",
            "OPENAI_API_KEY": "k",
            "TOOLCREW_MODEL": "m",
        }

        async def prepare() -> None:
            keys = BrokerSettings.model_validate({"redis_url": server.url}).signing_keys()
            async with redis.asyncio.Redis.from_url(server.url) as client:
                await RedisTenants(client, "default", keys).add("acme", TenantPolicy())
                server.publish_catalog(Catalog(tools=(build_spec("echo_tool"),)))
                await client.set(catalog_names_key("default", "sandbox"), json.dumps(["echo_tool"]))

        asyncio.run(prepare())

    def paste(self, line: str) -> Result:
        return CliRunner().invoke(app, shlex.split(line)[1:], env=self._environment)


def test_hints_of_batch_commands_work_for_a_tenant(redis_server: RedisProcess, tmp_path: Path) -> None:
    pool = Pool(redis_server)
    file, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    file.write_text('{"id": "a", "instruction": "act"}\n{"id": "b", "instruction": "act"}\n')
    submitted = pool.paste(f"toolcrew batches submit {file} --detach --id t2 --tenant acme --output {out}")
    assert submitted.exit_code == 0, submitted.output
    cancelled = pool.paste("toolcrew batches cancel t2 --tenant acme")
    assert cancelled.exit_code == 0, cancelled.output
    log = pool.paste("toolcrew batches show --logs t2 --tenant acme --json")
    page = tmp_path / "page.html"
    assert pool.paste(f"toolcrew batches export t2 --tenant acme --html {page}").exit_code == 0
    rows = tmp_path / "rows.jsonl"
    both = pool.paste(
        f"toolcrew batches export t2 --tenant acme --html {tmp_path / 'both.html'} --output {rows} --json"
    )
    assert (both.exit_code, rows.exists(), (tmp_path / "both.html").exists()) == (0, True, True)
    assert json.loads(both.stdout).keys() == {"id", "page", "rows"}
    hints = {*find_commands(submitted.output), *find_commands(log.output), *find_commands(page.read_text())}
    assert {" ".join(hint.split()[1:3]) for hint in hints} >= {"batches show", "batches resume"}
    for hint in hints:
        check_command(hint)
        assert hint.endswith("--tenant acme"), hint
        if "resume" not in hint:
            done = pool.paste(hint)
            assert done.exit_code == 0, (hint, done.output)


@pytest.mark.parametrize(
    ("line", "hints"),
    [
        ("tenants pause acme", {"tenants resume acme"}),
        ("tenants set nope --weight 2", {"tenants list", "tenants add nope"}),
        ("tenants set acme", {"tenants set --help"}),
        ("tenants add acme", {"tenants set --help"}),
        ("tenants remove nope", {"tenants list", "tenants add nope"}),
        ("tenants add new --tools ecko_tool", {"tools list"}),
        ("keys list nope", {"tenants list"}),
        ("keys revoke nope", {"keys list"}),
        ("keys create nope", {"tenants add nope"}),
        ("call echo_tool text=a --tenant nope", {"tenants add nope"}),
        ("call echo_tool text=a --tenant acme", {"up", "serve worker"}),
        ("skills remove nope --tenant acme", {"skills list --tenant acme"}),
        ("approvals decide nope allow", {"approvals list"}),
        ("hosts list", {"serve worker"}),
        ("hosts drain nope", {"serve worker"}),
    ],
)
def test_hints_of_a_command_work(line: str, hints: set[str], redis_server: RedisProcess) -> None:
    pool = Pool(redis_server)
    printed = find_commands(pool.paste(f"toolcrew {line}").output)
    assert {hint.removeprefix("toolcrew ") for hint in printed} == hints
    for hint in printed:
        done = pool.paste(f"{hint} --help" if hint in SERVERS else hint)
        assert done.exit_code == 0, (hint, done.output)


def test_hints_of_a_summary_and_a_report_name_the_tenant() -> None:
    progress = BatchProgress(4)
    kinds = (FailureKind.INFRASTRUCTURE, FailureKind.MODEL, FailureKind.CANCELLED)
    batch_events = [BatchNotice(at=1.0, message="submitted", total=4)]
    ends = [ended(2.0, f"i{at}", run=f"run{at}", failure=kind, code="X") for at, kind in enumerate(kinds)]
    for batch_event in (*batch_events, *ends):
        progress.add(batch_event)
    summary = DisplayedBatch("t2", progress, tenant="acme").summary()
    page = build_report([*batch_events, *ends], title="Batch t2", batch="t2", tenant="acme")
    for text in ("\n".join(summary.next), page):
        hints = find_commands(text)
        assert {hint.split()[2] for hint in hints} == {"resume", "show", "export"}
        for hint in hints:
            check_command(hint)
            assert hint.endswith("--tenant acme")


def test_printed_command_reads_the_next_page(redis_server: RedisProcess) -> None:
    pool = Pool(redis_server)

    async def open_some() -> None:
        async with redis.asyncio.Redis.from_url(redis_server.url) as client:
            for number in range(3):
                start = seal_start(redis_server.keys, "acme", f"s{number}", SessionSpec(image="python"))
                await SessionStore(client, "default").open(
                    "acme", f"s{number}", "host.a.b", start=start, ttl_s=60, limit=9
                )

    asyncio.run(open_some())
    for line in ("toolcrew sessions list --limit 1 --tenant acme", "toolcrew sessions list -n 1"):
        session_names = []
        while line:
            done = pool.paste(line)
            assert done.exit_code == 0, done.output
            session_names += [row.split()[0] for row in done.stdout.splitlines()[1:]]
            line = next(iter(find_commands(done.stderr)), "")
        assert sorted(session_names) == ["s0", "s1", "s2"]


def test_runs_of_all_tenants_are_listed_and_a_missing_run_names_the_list(redis_server: RedisProcess) -> None:
    pool = Pool(redis_server)

    async def start() -> None:
        keys = BrokerSettings.model_validate({"redis_url": redis_server.url}).signing_keys()
        async with redis.asyncio.Redis.from_url(redis_server.url) as client:
            durable_runs = DurableRuns(client, "default", keys, RedisTenants(client, "default", keys))
            for tenant in ("default", "acme"):
                await durable_runs.start(tenant, RunBody(instruction="Count the files."))

    asyncio.run(start())

    def list_tenants(options: str) -> list[str]:
        listed = json.loads(pool.paste(f"toolcrew runs list --json {options}").stdout)
        return [run["tenant"] for run in listed["runs"]]

    assert list_tenants("") == ["acme", "default"]
    assert list_tenants("--tenant acme") == ["acme"]
    assert list_tenants("--limit 1") == ["acme"]
    assert pool.paste("toolcrew runs list --cursor 1").exit_code == 2

    missing = pool.paste("toolcrew runs show nope --tenant acme")
    assert (missing.exit_code, find_commands(missing.stderr)) == (1, ["toolcrew runs list --tenant acme"])
    assert "/v1/" not in missing.stderr
