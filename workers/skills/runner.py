"""Runs a skill's script in the session's sandbox, from the read-only folder of the bundle. Also finds the
interpreter.
"""

import difflib
import json
import time
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from typing import Any

from pydantic import JsonValue

from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.guest_protocol import ExecRequest
from toolcrew.contract.skill_sidecars import Sidecar, build_argv
from toolcrew.contract.skills import INTERPRETERS, SCRIPTS, BundleFile
from toolcrew.workers.skills.loader import Skill, pack_skill, read_bundled
from toolcrew.workers.tools.base import Outcome, ToolEnvironment
from toolcrew.workers.tools.shell import run_shown
from toolcrew.workers.tools.text import build_outcome, encode, show_name

_SHEBANG_BYTES = 256


def run_script(
    skill: Skill, script: str, arguments: Mapping[str, JsonValue], call: Mapping[str, Any], environment: ToolEnvironment
) -> Outcome:
    """Run `script` with `arguments` as JSON on its standard input. `call` contains the arguments of the call of
    skill_tool.

    Raises ToolFailure, SandboxUnavailable.
    """
    started, file = time.monotonic(), find_script(skill, script)
    folder = place_skill(skill, environment)
    argv = _command(skill, file, f"{folder}/{file.path}")
    return _run(argv, encode(json.dumps(arguments, ensure_ascii=False), "args"), folder, call, started, environment)


def run_entrypoint(
    skill: Skill, sidecar: Sidecar, arguments: Mapping[str, JsonValue], environment: ToolEnvironment
) -> Outcome:
    """Run the skill as the tool that its sidecar defines. Raises the errors of `run_script`."""
    file = skill.find(sidecar.entrypoint)
    assert file is not None, "its sidecar was checked when it was loaded"
    started = time.monotonic()
    folder = place_skill(skill, environment)
    path = f"{folder}/{file.path}"
    argv = [sidecar.interpreter, path] if sidecar.interpreter is not None else _command(skill, file, path)
    if sidecar.args == "argv":
        return _run([*argv, *build_argv(arguments)], b"", folder, {}, started, environment)
    return _run(argv, encode(json.dumps(arguments, ensure_ascii=False), "arguments"), folder, {}, started, environment)


def place_skill(skill: Skill, environment: ToolEnvironment) -> str:
    """Return the skill's folder in the session's sandbox. The folder is read-only, except for a session's own skill.

    Raises ToolFailure, SandboxUnavailable.
    """
    return skill.place or environment.place_skill(
        skill.summary.digest, lambda: pack_skill(skill), is_shared=not skill.owner
    )


def _run(
    argv: list[str], body: bytes, folder: str, call: Mapping[str, Any], started: float, environment: ToolEnvironment
) -> Outcome:
    """Run `argv`. From `call` come the arguments that skill_tool shares with bash_tool. `started` is the time at which
    the call's time limit began.
    """
    context = environment.context
    remaining_s = context.timeout_s - (time.monotonic() - started)
    if remaining_s <= 0:
        raise ToolFailure(
            ErrorCode.TIMEOUT,
            f"copying the skill's files to the sandbox took all of {context.timeout_s:g} s: try again",
        )
    request = ExecRequest(argv=argv, cwd=context.cwd, env={"SKILL_DIR": folder}, timeout_s=remaining_s)
    return build_outcome(
        call, run_shown(request, body, environment), context, background="bash_tool and background=true"
    )


def find_script(skill: Skill, script: str) -> BundleFile:
    """Return the script with that name. The prefix scripts/ may be omitted.

    Raises ToolFailure(FILE_NOT_FOUND) with the most similar names.
    """
    file = skill.find(script if script.startswith(SCRIPTS) else SCRIPTS + script)
    if file is None:
        scripts = [file.path for file in skill.files if file.path.startswith(SCRIPTS)]
        raise ToolFailure(
            ErrorCode.FILE_NOT_FOUND,
            f"the skill {skill.name} has no script {show_name(script)}: "
            f"{name_nearest(script, scripts, 'it has no scripts')}",
        )
    return file


def name_nearest(name: str, names: Iterable[str], none: str) -> str:
    """Return the three most similar names as a text for an error message; `none` when there are no names."""
    nearest = difflib.get_close_matches(name, list(names), n=3, cutoff=0.0)
    return f"there are {', '.join(show_name(similar) for similar in nearest)}" if nearest else none


def _command(skill: Skill, file: BundleFile, path: str) -> list[str]:
    if file.first_bytes == b"#!":
        command = _read_first_line(
            read_bundled(skill, file, _SHEBANG_BYTES).split(b"\n")[0][2:].decode("utf-8", "replace")
        )
        if command:
            return [*command, path]
    interpreter = INTERPRETERS.get(PurePosixPath(file.path).suffix)
    if interpreter is not None:
        return [interpreter, path]
    if file.is_executable:
        return [path]
    raise ToolFailure(
        ErrorCode.INVALID_ARGUMENTS,
        f"{show_name(file.path)} of the skill {skill.name} cannot be run: it has no #! line and no execute "
        f"permission, and its suffix is none of {', '.join(INTERPRETERS)}; read it and run its steps with bash_tool",
    )


def _read_first_line(line: str) -> list[str]:
    """Return the command of a `#!` line as the kernel would run it: a program and at most one argument.

    For `#!/usr/bin/env program`, return that program directly, because an error of `env` would hide which program is
    missing.
    """
    program, _, argument = line.strip().replace("\t", " ").partition(" ")
    argument = argument.strip()
    if program.endswith("/env"):
        command = argument.removeprefix("-S ").split() if argument.startswith("-S ") else [argument]
        if (
            command
            and command[0]
            and " " not in command[0]
            and not command[0].startswith("-")
            and "=" not in command[0]
        ):
            return command
    return [program, *([argument] if argument else [])] if program else []
