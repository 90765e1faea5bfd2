"""`toolcrew secrets`: set, list and revoke secrets. A value is read from a file or from stdin, and never printed."""

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from toolcrew.contract.errors import ConfigError, ErrorCode, ToolFailure
from toolcrew.contract.tenancy import DEFAULT_TENANT
from toolcrew.orchestrator.cli.access import Deployment, open_deployment
from toolcrew.orchestrator.cli.runner import Json, Output, Tenant, as_command, list_json, list_output
from toolcrew.orchestrator.operations.views import view_secret
from toolcrew.store.audit import Role

MAX_INPUT_CHARS = 64 * 1024
secrets_app = typer.Typer(no_args_is_help=True)
OfDeployment = Annotated[
    bool, typer.Option("--deployment", help="A secret of the deployment itself, such as a model's API key.")
]
Name = Annotated[
    str, typer.Argument(help="Name of the secret and of its variable in the sandbox, such as GITHUB_TOKEN.")
]


@secrets_app.command("set")
@as_command
async def secrets_set(
    name: Name,
    host: Annotated[
        list[str] | None,
        typer.Option(
            "--host",
            help="A host that may receive the secret: NAME or NAME:PORT. Repeatable. Default: no host.",
        ),
    ] = None,
    place: Annotated[
        str, typer.Option("--place", help="The place of the secret in a request: header:NAME, query:NAME or basic.")
    ] = "header:Authorization",
    source: Annotated[
        Path | None, typer.Option("--from", help="The file with the value. Default: stdin.", dir_okay=False)
    ] = None,
    of_deployment: OfDeployment = False,
    tenant: Tenant = None,
    as_json: Json = False,
) -> Output:
    """Store a secret, or replace it, within 2 seconds everywhere. Line ends after the value are omitted."""
    async with open_deployment(_needed_role(of_deployment)) as deployment:
        owner = _find_owner(deployment, tenant, of_deployment)
        info = await deployment.secrets.set(owner, name, _read_value(source), hosts=tuple(host or ()), place=place)
    line = f"{name} is stored, revision {info.revision}, for {', '.join(info.hosts) or 'no sandbox'}"
    return Output(view_secret(name, info).model_dump(mode="json"), [line])


@secrets_app.command("list")
@as_command
async def secrets_list(
    of_deployment: Annotated[
        bool,
        typer.Option("--deployment", help="List the secrets of the deployment itself, such as a model's API key."),
    ] = False,
    tenant: Tenant = None,
    as_json: Json = False,
) -> Output:
    """List the secrets by name, without their values. No command shows a value."""
    async with open_deployment(_needed_role(of_deployment)) as deployment:
        found = await deployment.secrets.all(_find_owner(deployment, tenant, of_deployment))
    rows = [view_secret(name, info).model_dump(mode="json") for name, info in found.items()]
    shown = [{**row, "hosts": ", ".join(row["hosts"]) or "-"} for row in rows]
    return list_output(list_json("secrets", rows), shown, ("name", "hosts", "place", "revision", "changed_at", "state"))


@secrets_app.command("revoke")
@as_command
async def secrets_revoke(
    name: Name, of_deployment: OfDeployment = False, tenant: Tenant = None, as_json: Json = False
) -> Output:
    """Revoke a secret. It stops working everywhere within 2 seconds."""
    async with open_deployment(_needed_role(of_deployment)) as deployment:
        if not await deployment.secrets.revoke(_find_owner(deployment, tenant, of_deployment), name):
            raise ToolFailure(
                ErrorCode.INVALID_ARGUMENTS, f"there is no secret {name[:64]}: see `toolcrew secrets list`"
            )
    return Output({"name": name, "state": "revoked"}, [f"{name} is revoked"])


def _needed_role(of_deployment: bool) -> Role:
    return "admin" if of_deployment else "tenant"


def _find_owner(deployment: Deployment, tenant: str | None, of_deployment: bool) -> str | None:
    if of_deployment and tenant is not None:
        raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, "--deployment and --tenant were both given: give one of them")
    owner = None if of_deployment else tenant or deployment.actor.tenant or DEFAULT_TENANT
    if not of_deployment and not deployment.actor.may_act_for(owner):
        raise ToolFailure(
            ErrorCode.PERMISSION_DENIED,
            f"the API key belongs to tenant {deployment.actor.tenant}, not to {owner}: omit --tenant",
        )
    return owner


def _read_value(source: Path | None) -> str:
    """Return the value from the file, stdin, or a prompt that shows nothing."""
    if source is None and sys.stdin.isatty():
        return str(typer.prompt("Value", hide_input=True))
    try:
        with source.open(encoding="utf-8") if source is not None else nullcontext(sys.stdin) as stream:
            text = stream.read(MAX_INPUT_CHARS)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"the value was not read ({reason}): name a readable text file") from None
    return text.rstrip("\r\n")
