"""Run real programs in sandboxes and print one table; scripts/programs describes the options.

The programs are in scripts/programs.toml. Each runs in a session of its own, as uid 1000 and as root inside.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import time
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.processes import RunningSandboxd, running_sandboxd
from toolcrew.contract.session_spec import SandboxUser, SessionSpec
from toolcrew.contract.tenancy import SandboxPolicy
from toolcrew.workers.sandbox_client import SandboxClient

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "scripts" / "programs.toml"
LOGS = ROOT / "build" / "programs"
IMAGE = "toolcrew-programs:dev"
TIMEOUT_S = 400.0
LOG_BYTES = 64 * 1024
USERS: Sequence[SandboxUser] = ("sandbox", "root")
CLASSES = '{"default": {"largest": {"user": "root"}}, "ptrace": {"ptrace": true, "largest": {"user": "root"}}}'
"""The default class, except that a session may be root, and classes that rows name."""


@dataclass(frozen=True)
class Program:
    """A row of the data. `fails`: user -> why the program is known not to work. `error`: what it prints then."""

    name: str
    script: str
    fails: Mapping[SandboxUser, str]
    error: str
    is_shipped: bool
    tenant_class: str


@dataclass(frozen=True)
class Outcome:
    """The result of a program. `is_expected`: the data says so. `why`: the reason in the data, or else the last line of
    the output.
    """

    works: bool
    is_expected: bool
    why: str


def load_programs() -> list[Program]:
    """Return the rows of the data. Raises ValueError for an unknown or missing key."""
    rows = tomllib.loads(DATA.read_text())["program"]
    return [_parse(dict(row)) for row in rows]


def _parse(row: dict[str, str]) -> Program:
    found = {"sandbox": row.pop("user_fails", None), "root": row.pop("root_fails", None)}
    program = Program(
        name=row.pop("name"),
        script=row.pop("script"),
        fails={user: reason for user in USERS if (reason := found[user]) is not None},
        error=row.pop("error", ""),
        is_shipped=bool(row.pop("is_shipped", False)),
        tenant_class=row.pop("class", "default"),
    )
    if row:
        raise ValueError(f"{DATA.name}: {program.name} has unknown keys: {', '.join(row)}")
    return program


def run_program(
    sandboxd: RunningSandboxd, program: Program, user: SandboxUser, image: str = IMAGE, logs: Path = LOGS
) -> Outcome:
    """Run a program in a new session. Keep its output in `logs`."""
    body = f"set -eo pipefail\n{program.script}".encode()
    request = {"op": "exec", "argv": None, "script_bytes": len(body), "cwd": None, "state": "use"}
    capture = {"capture": {"merged": LOG_BYTES}, "timeout_s": TIMEOUT_S}
    spec = SessionSpec(image=image, user=user)
    policy = SandboxPolicy(tenant_class=program.tenant_class)
    with SandboxClient(sandboxd.socket) as client:
        name = client.open("programs", secrets.token_hex(4), spec, policy=policy)
        answer = client.call(name, {**request, **capture}, body)
        client.close(name)
    output = answer.streams.get("merged", b"").decode(errors="replace")
    output += answer.done.get("error", {}).get("message", "")
    logs.mkdir(parents=True, exist_ok=True)
    (logs / f"{user}.{program.name.replace('/', '-')}.log").write_text(f"{output}\n{dict(answer.done)}\n")
    lines = [line for line in output.splitlines() if line.strip()]
    works = answer.done.get("exit_code") == 0
    reason = program.fails.get(user)
    is_expected = works if reason is None else not works and program.error in output
    return Outcome(works, is_expected, reason or (lines[-1].strip() if lines else str(dict(answer.done))))


def try_programs(sandboxd: RunningSandboxd, programs: Iterable[Program], users: Sequence[SandboxUser]) -> int:
    """Run the programs and print one row for each. Return the number of results that the data does not say."""
    unexpected = 0
    print("| program | user | result | |\n|---|---|---|---|")
    for program in programs:
        for user in users:
            began = time.monotonic()
            outcome = run_program(sandboxd, program, user)
            unexpected += not outcome.is_expected
            result = ("works" if outcome.works else "does not work") + (
                "" if outcome.is_expected else ", **unexpected**"
            )
            print(f"| {program.name} | {user} | {result} | {'' if outcome.works else outcome.why} |", flush=True)
            print(f"programs: {program.name}, {user}: {time.monotonic() - began:.0f} s", file=sys.stderr)
    return unexpected


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="scripts/programs")
    parser.add_argument("--rows", default="", metavar="TEXT", help="only rows with this text in their name")
    parser.add_argument("--user", choices=USERS, help="only as this user")
    chosen = parser.parse_args(arguments)
    rows = [program for program in load_programs() if chosen.rows in program.name]
    settings = {"TOOLCREW_TENANT_CLASSES": CLASSES, "TOOLCREW_SANDBOX_IMAGES_ALLOWED": f'["{IMAGE}"]'}
    with running_sandboxd(settings) as sandboxd:
        return int(try_programs(sandboxd, rows, (chosen.user,) if chosen.user else USERS) > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
