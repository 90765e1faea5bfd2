"""`toolcrew config`: shows the settings, and prepares Redis for them: its users, and signatures by a new secret."""

import asyncio
import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BaseModel

from contract.errors import ConfigError, OperatorError
from contract.setting_rows import build_rows
from orchestrator.cli.access import open_deployment
from orchestrator.cli.runner import EXIT_ERROR, Json, run_work
from orchestrator.operations.redis_users import ROLES, build_users, hash_password
from orchestrator.settings import child_environment, load_settings, program
from orchestrator.terminal.output import escape_controls
from store.resealing import Resealed, reseal
from telemetry.settings import load_tracing_settings

config_app = typer.Typer(no_args_is_help=True, help="Show settings; write Redis users; sign records by a new secret.")

MAX_CHARS = 100
"""Of a value in a terminal; --json gives all of it."""
ANSWER_S = 30.0
PROCESSES: dict[str, Callable[[], BaseModel]] = {
    "orchestrator": load_settings,
    "tracing, of all": load_tracing_settings,
}


@config_app.command("show")
def config_show(
    origin: Annotated[
        bool, typer.Option("--origin", help="Say of each where it comes from, and what it is by default.")
    ] = False,
    is_set: Annotated[bool, typer.Option("--set", help="Only those that the environment sets.")] = False,
    as_json: Json = False,
) -> None:
    """Show every setting of every process in this environment, with secrets masked.

    A process elsewhere has an environment of its own: run this there. Exit code 1 when a process would not start with
    these settings.
    """
    told = run_work(read_settings(), as_json)
    if is_set:
        told = [{**one, "settings": [row for row in one["settings"] if row["origin"] != "default"]} for one in told]
    if as_json:
        typer.echo(json.dumps({"processes": told}))
    else:
        for line in _lines(told, has_origin=origin):
            typer.echo(escape_controls(line))
    raise typer.Exit(EXIT_ERROR if any(one["problem"] for one in told) else 0)


@config_app.command("users")
def config_users(
    roles: Annotated[
        list[str] | None, typer.Option("--role", help=f"One of {', '.join(ROLES)}; repeat it. Else all of them.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="The ACL file to write, for Redis's `aclfile`.")] = Path(
        "users.acl"
    ),
    passwords: Annotated[Path, typer.Option("--passwords", help="The new passwords, as an env file.")] = Path(
        "redis-passwords.env"
    ),
    as_json: Json = False,
) -> None:
    """Write users for Redis with new random passwords.

    The ACL file holds only hashes of the passwords, the env file the passwords. The rules name the deployment of
    TOOLCREW_DEPLOYMENT. Neither file is overwritten.
    """

    async def work() -> None:
        _write_users(roles or list(ROLES), out, passwords)

    run_work(work(), as_json)
    if as_json:
        typer.echo(json.dumps({"acl_file": str(out), "passwords_file": str(passwords), "roles": roles or list(ROLES)}))
        return
    typer.echo(
        f"wrote {out} (for Redis: aclfile {out}) and {passwords} (keep it secret; each process gets its own user's)",
        err=True,
    )


@config_app.command("reseal")
def config_reseal(as_json: Json = False) -> None:
    """Sign API keys, policies, switches and installed skills again with the present secret.

    Run it after TOOLCREW_SECRET was changed everywhere and before the old secret is removed from
    TOOLCREW_SECRETS_PREVIOUS. It can be repeated.
    """

    async def work() -> Resealed:
        async with open_deployment("admin") as deployment:
            return await reseal(deployment.redis, deployment.broker.deployment, deployment.signing_keys)

    done = run_work(work(), as_json)
    if as_json:
        typer.echo(json.dumps({"signed": done.signed, "refused": done.refused}))
        return
    typer.echo(f"{done.signed} records have a new signature")
    for name in done.refused:
        typer.echo(
            f"{escape_controls(name)} cannot be verified and was left as it is: remove it or set it again", err=True
        )


def _lines(told: list[dict[str, Any]], *, has_origin: bool) -> Iterator[str]:
    width = max((len(row["name"]) for one in told for row in one["settings"]), default=0)
    for number, one in enumerate(told):
        if number:
            yield ""
        yield f"{one['process']}:"
        if one["problem"]:
            yield f"  would not start: {one['problem']}"
        for row in one["settings"]:
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


async def read_settings() -> list[dict[str, Any]]:
    """Return `process`, `settings` (name, value, default, origin) and `problem` of each process: why it cannot start,
    or "". Raises OperatorError.
    """
    return [_describe(process, load) for process, load in PROCESSES.items()] + await _read_worker_settings()


def _describe(process: str, load: Callable[[], BaseModel]) -> dict[str, Any]:
    try:
        return {"process": process, "problem": "", "settings": [asdict(row) for row in build_rows(load())]}
    except ConfigError as error:
        return {"process": process, "problem": str(error), "settings": []}


async def _read_worker_settings() -> list[dict[str, Any]]:
    """Ask a process of the worker side: neither side knows the other's settings."""
    process = await asyncio.create_subprocess_exec(
        *program("workers.setting_list"),
        env=child_environment({}),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(ANSWER_S):
            out, err = await process.communicate()
    except BaseException as error:
        process.kill()
        await process.wait()
        if isinstance(error, TimeoutError):
            raise OperatorError(
                f"the workers did not report their settings within {ANSWER_S:g} s: try again when the host is less busy"
            ) from None
        raise
    if process.returncode:
        last_words = err.decode(errors="replace").strip()[-300:]
        raise OperatorError(
            f"the workers did not report their settings ({last_words}): install toolcrew again, with the extra 'worker'"
        )
    return list(json.loads(out))


def _write_users(roles: list[str], out: Path, passwords: Path) -> None:
    """Raises ConfigError for an unknown role, and for a file that is there or cannot be written."""
    made = {role: secrets.token_urlsafe(32) for role in roles}
    lines = build_users(load_settings().deployment, {role: hash_password(password) for role, password in made.items()})
    for path in (out, passwords):
        if path.exists():
            raise ConfigError(f"{path} is there already and is not overwritten: move it away, or name another file")
    _write_new(
        passwords, "".join(f"TOOLCREW_REDIS_{role.upper()}_PASSWORD={password}\n" for role, password in made.items())
    )
    try:
        _write_new(out, lines)
    except ConfigError:
        # The one without the other is good for nothing, and in the way of the next attempt.
        passwords.unlink()
        raise


def _write_new(path: Path, text: str) -> None:
    """A file that nobody else may read, also while it is written."""
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}): name another file") from error
