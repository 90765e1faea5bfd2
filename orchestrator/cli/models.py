"""`toolcrew models`: list, set and remove model endpoints. No command shows an API key."""

from typing import Annotated, Any

import typer
from pydantic import ValidationError

from toolcrew.contract.errors import ConfigError, ErrorCode, ToolFailure
from toolcrew.contract.invalid_input import find_invalid
from toolcrew.contract.model_endpoints import EndpointView, ModelEndpoint, endpoint_field
from toolcrew.orchestrator.cli.access import open_deployment
from toolcrew.orchestrator.cli.clients import open_tenant_client
from toolcrew.orchestrator.cli.runner import Json, Output, as_command, list_json, list_output

models_app = typer.Typer(no_args_is_help=True)

_OPTIONS = {"base_url": "url", "context_tokens": "context", "requests_per_minute": "rpm", "tokens_per_minute": "tpm"}
"""Field -> option, for options that are not named after their field."""
Name = Annotated[str, typer.Argument(help="The endpoint. Runs name it as their model.")]
Owner = Annotated[str | None, typer.Option("--tenant", help="The tenant that owns it. Default: the deployment.")]


@models_app.command("list")
@as_command
async def models_list(
    tenant: Annotated[
        str | None, typer.Option("--tenant", help="Only what this tenant may use. Default, for operators: all.")
    ] = None,
    as_json: Json = False,
) -> Output:
    """List the model endpoints, without their API keys. A tenant's key sees those that the tenant may use."""
    async with open_tenant_client(tenant, needs_workers=False) as client:
        views = await client.models(tenant)
    columns = ("name", "tenant", "model", "url", "secret", "prices", "requests", "fallback", "state")
    return list_output(
        list_json("models", [view.model_dump() for view in views]), [_row(view) for view in views], columns
    )


@models_app.command("set")
@as_command
async def models_set(
    name: Name,
    base_url: Annotated[
        str | None, typer.Option("--url", help="Base URL of the server; it usually ends in /v1.")
    ] = None,
    model: Annotated[str | None, typer.Option("--model", help="Name of the model at the server.")] = None,
    secret: Annotated[
        str | None,
        typer.Option("--secret", help="Name of the stored secret with the API key (toolcrew secrets set NAME)."),
    ] = None,
    prompt_price: Annotated[
        float | None, typer.Option("--prompt-price", help="Price of a million prompt tokens.")
    ] = None,
    completion_price: Annotated[
        float | None, typer.Option("--completion-price", help="Price of a million completion tokens.")
    ] = None,
    cached_price: Annotated[
        float | None, typer.Option("--cached-price", help="Price of a million cached prompt tokens.")
    ] = None,
    context_tokens: Annotated[int | None, typer.Option("--context", help="Context window, in tokens.")] = None,
    concurrency: Annotated[int | None, typer.Option("--concurrency", help="Concurrent requests.")] = None,
    requests_per_minute: Annotated[int | None, typer.Option("--rpm", help="Requests per minute.")] = None,
    tokens_per_minute: Annotated[int | None, typer.Option("--tpm", help="Tokens per minute.")] = None,
    fallback: Annotated[
        str | None, typer.Option("--fallback", help="Endpoint that answers while this one is down or blocked.")
    ] = None,
    unset: Annotated[list[str] | None, typer.Option("--unset", help="Name of an option to remove.")] = None,
    tenant: Owner = None,
    as_json: Json = False,
) -> Output:
    """Add or change a model endpoint. Options that are not given keep their values.

    Every process applies the change within 2 seconds. Limits hold for all orchestrators together.
    """
    options = {field: value for field, value in locals().items() if field in ModelEndpoint.model_fields}
    async with open_deployment("admin") as deployment:
        present = (await deployment.models.all()).get(endpoint_field(name, tenant))
        values = {} if present is None or isinstance(present, ConfigError) else present.model_dump()
        endpoint = _build({**values, **{field: value for field, value in options.items() if value is not None}}, unset)
        await deployment.models.set(name, endpoint, tenant)
    view = EndpointView(name=name, tenant=tenant, **endpoint.model_dump())
    return Output(view.model_dump(), [f"{name} is set: {endpoint.model} at {endpoint.base_url}"])


@models_app.command("remove")
@as_command
async def models_remove(name: Name, tenant: Owner = None, as_json: Json = False) -> Output:
    """Remove a model endpoint. Its runs end at their next request."""
    async with open_deployment("admin") as deployment:
        if not await deployment.models.remove(name, tenant):
            raise ToolFailure(
                ErrorCode.INVALID_ARGUMENTS, f"there is no model endpoint {name[:64]}: see `toolcrew models list`"
            )
    return Output({"name": name, "state": "removed"}, [f"{name} is removed"])


def _build(values: dict[str, Any], unset: list[str] | None) -> ModelEndpoint:
    """Return the endpoint without the options in `unset`. Raises ToolFailure(INVALID_ARGUMENTS) with the option."""
    fields = {_option(field): field for field in ModelEndpoint.model_fields}
    for option in unset or ():
        if option not in fields:
            raise ToolFailure(
                ErrorCode.INVALID_ARGUMENTS, f"--unset: there is no option '{option}': use one of {', '.join(fields)}"
            )
        values.pop(fields[option], None)
    try:
        return ModelEndpoint.model_validate(values)
    except ValidationError as error:
        part = find_invalid(error)
        option = f"--{_option(str(part.path[0]))}: " if part.path else ""
        raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, f"{option}{part.reason}") from None


def _option(field: str) -> str:
    return _OPTIONS.get(field, field.replace("_", "-"))


def _row(view: EndpointView) -> dict[str, Any]:
    prices = (view.prompt_price, view.completion_price)
    state = f"blocked for {view.blocked_s:.0f} s" if view.blocked_s else view.state
    return {
        "name": view.name,
        "tenant": view.tenant or "-",
        "model": view.model or "-",
        "url": view.base_url or "-",
        "secret": view.secret or "-",
        "prices": "-" if None in prices else "/".join(f"{price:g}" for price in prices),
        "requests": f"{view.running}/{view.concurrency}" if view.concurrency else "-",
        "fallback": view.fallback or "-",
        "state": state,
    }
