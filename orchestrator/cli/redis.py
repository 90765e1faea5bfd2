"""`toolcrew redis`: users for Redis, and new signatures for its records."""

import json
import os
import secrets
from pathlib import Path
from typing import Annotated

import typer

from contract.errors import ConfigError
from orchestrator.cli.access import open_deployment
from orchestrator.cli.runner import Json, run_work
from orchestrator.operations.redis_users import ROLES, build_users, hash_password
from orchestrator.settings import load_settings
from orchestrator.terminal.output import escape_controls
from store.resealing import Resealed, reseal

redis_app = typer.Typer(no_args_is_help=True, help="Users for Redis, and signatures of its records.")


@redis_app.command("users")
def redis_users(
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
    """Write Redis users with new random passwords: an ACL file that holds only their hashes, and an env file that holds
    them.

    The rules name the deployment of TOOLCREW_DEPLOYMENT. Neither file is overwritten.
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


@redis_app.command("reseal")
def redis_reseal(as_json: Json = False) -> None:
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
