"""`toolcrew config`: show settings, write Redis users, and sign stored records with a new secret."""

import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BaseModel, SecretStr, ValidationError

from toolcrew.contract.errors import ConfigError
from toolcrew.contract.invalid_input import find_invalid
from toolcrew.contract.plurals import count
from toolcrew.contract.setting_rows import build_rows
from toolcrew.contract.settings import (
    EgressSettings,
    SandboxdSettings,
    WebSettings,
    WorkerSettings,
    load_settings,
    load_tracing_settings,
    read_environment,
)
from toolcrew.orchestrator.cli.access import open_deployment
from toolcrew.orchestrator.cli.runner import EXIT_ERROR, Json, Output, as_command
from toolcrew.orchestrator.operations.redis_users import ROLES, build_users, hash_password
from toolcrew.store.resealing import reseal

config_app = typer.Typer(no_args_is_help=True)

MAX_CHARS = 100
"""Limit of a value in the text output, in characters. --json prints the whole value."""


@config_app.command("show")
@as_command
async def config_show(
    origin: Annotated[bool, typer.Option("--origin", help="Show the origin and the default of each setting.")] = False,
    is_set: Annotated[bool, typer.Option("--set", help="Only settings that the environment sets.")] = False,
    as_json: Json = False,
) -> Output:
    """Show every setting of every process in this environment, with secrets masked.

    Another host has its own environment: run the command there. Exit code 1: a process would not start with these
    settings.
    """
    processes = read_settings()
    if is_set:
        processes = [
            {**process, "settings": [row for row in process["settings"] if row["origin"] != "default"]}
            for process in processes
        ]
    exit_code = EXIT_ERROR if any(process["problem"] for process in processes) else 0
    return Output({"processes": processes}, list(_lines(processes, has_origin=origin)), exit_code=exit_code)


@config_app.command("users")
@as_command
async def config_users(
    roles: Annotated[
        list[str] | None, typer.Option("--role", help=f"One of {', '.join(ROLES)}; repeat the option. Default: all.")
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", help="The ACL file to write, for the option `aclfile` of Redis.")
    ] = Path("users.acl"),
    passwords: Annotated[Path, typer.Option("--passwords", help="The env file to write the new passwords to.")] = Path(
        "redis-passwords.env"
    ),
    as_json: Json = False,
) -> Output:
    """Write users for Redis with new random passwords.

    The ACL file contains hashes of the passwords; the env file contains the passwords. The rules apply to the
    deployment that TOOLCREW_DEPLOYMENT names. Existing files are not overwritten.
    """
    written = roles or list(ROLES)
    _write_users(written, out, passwords)
    note = (
        f"wrote {out} (for Redis: aclfile {out}) and {passwords} (keep it secret; give each process only the "
        "password of its own user)"
    )
    return Output({"acl_file": str(out), "passwords_file": str(passwords), "roles": written}, notes=[note])


@config_app.command("reseal")
@as_command
async def config_reseal(as_json: Json = False) -> Output:
    """Sign API keys, policies, disabled tools, model endpoints and skills again with TOOLCREW_SECRET. Encrypt secrets
    again.

    Run the command after TOOLCREW_SECRET has changed in every process and before the old secret is removed from
    TOOLCREW_SECRETS_PREVIOUS. The command is safe to repeat.
    """
    async with open_deployment("admin") as deployment:
        done = await reseal(deployment.redis, deployment.broker.deployment, deployment.signing_keys)
    notes = [
        f"{name} cannot be verified and was not signed: remove the record or set it again" for name in done.refused
    ]
    return Output(asdict(done), [f"{count(done.signed, 'record has', 'records have')} a new signature"], notes)


def _lines(processes: list[dict[str, Any]], *, has_origin: bool) -> Iterator[str]:
    width = max((len(row["name"]) for process in processes for row in process["settings"]), default=0)
    for number, process in enumerate(processes):
        if number:
            yield ""
        yield f"{process['process']}:"
        if process["problem"]:
            yield f"  would not start: {process['problem']}"
        for row in process["settings"]:
            yield f"  {row['name']:<{width}}  {_value(row)}{_origin(row) if has_origin else ''}"


def _value(row: Mapping[str, Any]) -> str:
    value = row["value"]
    if value is None:
        return "(not set)"
    text = str(value)
    return text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]} [{len(text)} characters; --json has all]"


def _origin(row: Mapping[str, Any]) -> str:
    if row["origin"] == "default":
        return "  [default]"
    default = row["default"]
    return f"  [{row['origin']}; default: {'(none)' if default is None else default}]"


def read_settings() -> list[dict[str, Any]]:
    """Return `process`, `settings` (name, value, default, origin) and `problem` of each process. `problem` is the
    reason why the process cannot start, or "".
    """
    return [_describe(process, load) for process, load in PROCESSES.items()]


def _describe(process: str, load: Callable[[], BaseModel]) -> dict[str, Any]:
    try:
        return {"process": process, "problem": "", "settings": [asdict(row) for row in build_rows(load())]}
    except ConfigError as error:
        return {"process": process, "problem": str(error), "settings": []}


def _load_worker() -> WorkerSettings:
    """Return the worker's settings. A host without workers needs no Redis URL: the URL is then empty.

    Raises ConfigError: another setting is invalid.
    """
    try:
        return read_environment(WorkerSettings)
    except ConfigError as error:
        cause = error.__cause__
        if isinstance(cause, ValidationError) and [
            entry["loc"] for entry in cause.errors() if entry["type"] == "missing"
        ] == [("redis_url",)]:
            return _without_redis()
        raise


def _without_redis() -> WorkerSettings:
    """Read the settings with an empty Redis URL. Raises ConfigError: another setting is invalid."""
    try:
        return WorkerSettings(redis_url=SecretStr(""))
    except ValidationError as error:
        part = find_invalid(error)
        raise ConfigError(f"TOOLCREW_{str(part.path[0]).upper()}: {part.reason}") from error


PROCESSES: dict[str, Callable[[], BaseModel]] = {
    "orchestrator": load_settings,
    "tracing, of all": load_tracing_settings,
    "worker": _load_worker,
    "sandboxd": partial(read_environment, SandboxdSettings),
    "web tools": partial(read_environment, WebSettings),
    "egress proxy": partial(read_environment, EgressSettings),
}


def _write_users(roles: list[str], out: Path, passwords_file: Path) -> None:
    """Write the ACL file and the file of passwords. Raises ConfigError for an unknown role, and for a file that exists
    or cannot be written.
    """
    passwords = {role: secrets.token_urlsafe(32) for role in roles}
    lines = build_users(
        load_settings().deployment, {role: hash_password(password) for role, password in passwords.items()}
    )
    for path in (out, passwords_file):
        if path.exists():
            raise ConfigError(f"{path} exists already and was not overwritten: move the file, or name another one")
    _write_new(
        passwords_file,
        "".join(f"TOOLCREW_REDIS_{role.upper()}_PASSWORD={password}\n" for role, password in passwords.items()),
    )
    try:
        _write_new(out, lines)
    except ConfigError:
        # Passwords without the ACL file are useless, and the file would make the next attempt fail.
        passwords_file.unlink()
        raise


def _write_new(path: Path, text: str) -> None:
    # The mode is set at creation, so that no other user can read the file while it is written.
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}): name another file") from error
