"""Puts the API together: its routes, the order of its layers, and how it describes itself."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.openapi.utils import get_openapi

from contract.calls import MAX_BLOB_BYTES
from orchestrator.api import (
    approvals,
    audit,
    batches,
    call_lives,
    calls,
    health,
    hosts,
    pages,
    problems,
    runs,
    sessions,
    skills,
    tenants,
    tools,
)
from orchestrator.api.door import Door
from orchestrator.api.exact_json import ExactJson
from orchestrator.api.house import Beside, House
from orchestrator.api.idempotency import Idempotency
from orchestrator.api.limits import BATCH_BYTES, LOGIN_BYTES, SKILL_BYTES, BodyLimits

VERSION = "v1"
_ABOUT = """Runs, sessions, tools, approvals, batches, tenants and hosts of a toolcrew deployment.

Each request carries an API key (`Authorization: Bearer KEY`), which says for which tenant it is; keys of operators may
name another with `?tenant=`. Errors are `application/problem+json` with a closed `code`. Lists come in pages: give
`next_cursor` as `cursor`. A `POST` with an `Idempotency-Key` is done once, however often it is sent."""


def build_app(house: House, beside: Beside) -> FastAPI:
    """The application of one process. `beside`: what runs with it while it is connected."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with house.open(beside):
            yield

    app = FastAPI(
        title="toolcrew",
        version=VERSION,
        description=_ABOUT,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        default_response_class=ExactJson,
        responses=problems.responses(),
        separate_input_output_schemas=False,
    )
    app.state.house = house
    named = (health, runs, sessions, calls, call_lives, tools, skills, batches, approvals, tenants, hosts, audit)
    routers: list[APIRouter] = [*(routes.router for routes in named), pages.build_router()]
    problems.install(app, routers)
    for router in routers:
        app.include_router(router)
    app.add_middleware(Idempotency, house=house)
    other = (
        ("PUT", "/v1/sessions/[^/]+/files/.*", MAX_BLOB_BYTES),
        ("POST", "/v1/skills", SKILL_BYTES),
        ("POST", "/v1/batches", BATCH_BYTES),
        ("POST", "/login", LOGIN_BYTES),
    )
    app.add_middleware(BodyLimits, other=other)
    # Outermost: keys and rates are checked before a byte of a body is read.
    app.add_middleware(Door, house=house)
    app.openapi = partial(_describe, app)  # type: ignore[method-assign]
    return app


def _describe(app: FastAPI) -> dict[str, Any]:
    """The API as OpenAPI, with the shape of its problems, which no route names as its own."""
    if app.openapi_schema is None:
        told = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        told["components"]["schemas"]["Problem"] = problems.Problem.model_json_schema()
        app.openapi_schema = told
    return app.openapi_schema
