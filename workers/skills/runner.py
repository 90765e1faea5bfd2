"""Runs a skill's script in the session's sandbox: brings the bundle there once, finds what runs the script."""

import difflib
import json
import secrets
import time
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from typing import Any

from pydantic import JsonValue

from contract.errors import ErrorCode, ToolFailure
from contract.skills import INTERPRETERS, SCRIPTS, BundleFile
from workers.skills.loader import Skill, pack_skill, read_bundled
from workers.tools.base import Outcome, Workbench
from workers.tools.command_text import build_outcome
from workers.tools.imports import build_import, check_import
from workers.tools.shell import run_shown
from workers.tools.text import encode, show_name

_ABSENT, _NO_PROGRAM = 10, 11
_PROBE = f'[ -d "$1" ] || exit {_ABSENT}; command -v -- "$2" >/dev/null || exit {_NO_PROGRAM}'
# Unpacked beside its place and then moved there: what is there is whole. Of two calls at a time the second finds it made.
_PLACE = """
set -e
trap 'rm -rf -- "$2"' EXIT
mkdir -p -- "$2"
"${@:3}"
chmod 0755 -- "$2"
mv -T -- "$2" "$1" 2>/dev/null || [ -d "$1" ]
"""
_SHEBANG_BYTES = 256


def place_of(skill: Skill, workspace: str) -> str:
    """The bundle's folder in a sandbox."""
    return f"{workspace.rstrip('/')}/.toolcrew/skills/{skill.name}-{skill.summary.digest[:12]}"


def run_script(skill: Skill, script: str, arguments: Mapping[str, JsonValue], call: Mapping[str, Any], bench: Workbench) -> Outcome:
    """Run `script` with `arguments` as JSON on its standard input. `call`: the arguments of the whole call. Raises ToolFailure, SandboxUnavailable."""
    begun = time.monotonic()
    file = find_script(skill, script)
    place = place_of(skill, bench.context.cwd)
    argv = _command(skill, file, f"{place}/{file.path}")
    _prepare(skill, file, place, argv[0], bench)
    left_s = max(0.1, bench.context.timeout_s - (time.monotonic() - begun))
    request = {**_request(argv, bench), "env": {"SKILL_DIR": place}, "timeout_s": left_s}
    body = encode(json.dumps(arguments, ensure_ascii=False), "args")
    return build_outcome(call, run_shown(request, body, bench), bench.context, background="bash_tool and background=true")


def find_script(skill: Skill, script: str) -> BundleFile:
    """The file of that name below scripts/, which may be left out. Raises ToolFailure(FILE_NOT_FOUND) with the nearest names."""
    file = skill.find(script if script.startswith(SCRIPTS) else SCRIPTS + script)
    if file is None:
        scripts = [file.path for file in skill.files if file.path.startswith(SCRIPTS)]
        raise ToolFailure(
            ErrorCode.FILE_NOT_FOUND,
            f"the skill {skill.name} has no script {show_name(script)}: {name_nearest(script, scripts, 'it has no scripts')}",
        )
    return file


def name_nearest(name: str, names: Iterable[str], none: str) -> str:
    """What there is instead, for a sentence: the three names most like it. `none`: when there is nothing."""
    nearest = difflib.get_close_matches(name, list(names), n=3, cutoff=0.0)
    return f"there are {', '.join(show_name(one) for one in nearest)}" if nearest else none


def _command(skill: Skill, file: BundleFile, path: str) -> list[str]:
    if file.mark == b"#!":
        first = read_bundled(skill, file)[:_SHEBANG_BYTES].split(b"\n")[0][2:].decode("utf-8", "replace").strip()
        program, _, argument = first.partition(" ")
        # `env` would hide from us which program is missing.
        words = [*argument.split()] if program.endswith("/env") else [program, *([argument.strip()] if argument.strip() else [])]
        words = words[1:] if words[:1] == ["-S"] else words
        if words and words[0]:
            return [*words, path]
    interpreter = INTERPRETERS.get(PurePosixPath(file.path).suffix)
    if interpreter is not None:
        return [interpreter, path]
    if file.is_executable:
        return [path]
    raise ToolFailure(
        ErrorCode.INVALID_ARGUMENTS,
        f"{show_name(file.path)} of the skill {skill.name} cannot be run: it has neither a line #! nor a run bit, and its name ends in none of "
        f"{', '.join(INTERPRETERS)}; read it and do what it does with bash_tool",
    )


def _prepare(skill: Skill, file: BundleFile, place: str, program: str, bench: Workbench) -> None:
    """The bundle is in the sandbox then, and so is what runs the script. Raises ToolFailure."""
    code = _probe(place, program, bench)
    if code == _ABSENT:
        _install(skill, place, bench)
        code = _probe(place, program, bench)
    if code == _NO_PROGRAM:
        raise ToolFailure(
            ErrorCode.FILE_NOT_FOUND,
            f"the sandbox has no {show_name(program)}, which {show_name(file.path)} of the skill {skill.name} needs: do what it does in another way",
        )
    if code != 0:
        raise ToolFailure(ErrorCode.INTERNAL, f"the files of the skill {skill.name} are not in the sandbox ({code})")


def _probe(place: str, program: str, bench: Workbench) -> int | None:
    response = bench.run({**_request(["bash", "-c", _PROBE, "skill", place, program], bench), "capture": {"stderr": 1024}})
    code = response.done["exit_code"]
    return None if code is None else int(code)


def _install(skill: Skill, place: str, bench: Workbench) -> None:
    beside = f"{place}.{secrets.token_hex(4)}"
    argv = ["bash", "-c", _PLACE, "skill", place, beside, *build_import("tar.gz", beside)]
    response = bench.run({**_request(argv, bench), "capture": {"stdout": 4096, "stderr": 16_384}}, pack_skill(skill))
    done, words = response.done, response.streams.get("stderr", b"").decode("utf-8", "replace")
    check_import("tar.gz", done["exit_code"], words, timed_out=done["timed_out"], timeout_s=bench.context.timeout_s)


def _request(argv: list[str], bench: Workbench) -> dict[str, Any]:
    context = bench.context
    return {"op": "exec", "argv": argv, "script_bytes": 0, "cwd": context.cwd, "env": {}, "timeout_s": context.timeout_s}
