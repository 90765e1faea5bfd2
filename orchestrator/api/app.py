"""Builds the API application: its routes, the order of its middleware, and its OpenAPI description."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import cache, partial
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.routing import BaseRoute

from toolcrew.contract.calls import MAX_BLOB_BYTES
from toolcrew.contract.file_ids import MAX_WORKSPACE_BYTES
from toolcrew.contract.process_views import MAX_POSITION
from toolcrew.orchestrator.api import (
    approvals,
    audit,
    batches,
    call_lives,
    calls,
    checkpoints,
    files,
    health,
    hosts,
    models,
    own_key,
    pages,
    ports,
    pressure,
    previews,
    problem_handlers,
    processes,
    runs,
    secrets,
    session_files,
    sessions,
    skills,
    tenants,
    tools,
    usage,
)
from toolcrew.orchestrator.api.access import ApiAuthentication
from toolcrew.orchestrator.api.api_state import ApiState
from toolcrew.orchestrator.api.exact_json import ExactJson
from toolcrew.orchestrator.api.idempotency import Idempotency
from toolcrew.orchestrator.http.app_state import ConnectedWork
from toolcrew.orchestrator.http.body_limits import LOGIN_BYTES, RELAYED_BYTES, STREAMED_BYTES, BodyLimit, BodyLimits
from toolcrew.orchestrator.http.problems import Problem

VERSION = "v1"
BATCH_BYTES = 200 * 1024 * 1024
SKILL_BYTES = 16 * 1024 * 1024
"""Limit of a skill's .zip file, in bytes.

The file is stored in /tmp during the examination, and /tmp is small in a deployment. The CLI accepts larger files.
"""
_ABOUT = """Runs, sessions, tools, approvals, batches, tenants and hosts of a toolcrew deployment.

Each request carries an API key (`Authorization: Bearer KEY`) of a tenant; operators' keys may select another tenant
with `?tenant=`. Errors are `application/problem+json` with a `code` from a fixed list. Lists are paged: send
`next_cursor` as `cursor`. A `POST` with an `Idempotency-Key` is executed once, even if it is sent several times."""


def build_app(app_state: ApiState, work: ConnectedWork) -> FastAPI:
    """Build the application of one process. `work` runs while the process is connected to Redis."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with app_state.open(work):
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
        responses=problem_handlers.responses(),
        separate_input_output_schemas=False,
    )
    app.state.app_state = app_state
    problem_handlers.install(app, _list_routers())
    app.router.routes += _build_routes()
    app.add_middleware(Idempotency, app_state=app_state)
    limits = (
        BodyLimit("PUT", "/v1/sessions/[^/]+/files/.*", MAX_POSITION, held_bytes=RELAYED_BYTES),
        BodyLimit("PUT", "/v1/sessions/[^/]+/archive", MAX_BLOB_BYTES),
        BodyLimit("POST", "/v1/skills", SKILL_BYTES),
        BodyLimit("POST", "/v1/batches", BATCH_BYTES),
        BodyLimit("POST", "/v1/files", MAX_WORKSPACE_BYTES, held_bytes=STREAMED_BYTES),
        BodyLimit("POST", "/login", LOGIN_BYTES),
    )
    app.add_middleware(BodyLimits, path_limits=limits)
    # The middleware that is added last runs first. Keys and rates are checked before a byte of a body is read.
    app.add_middleware(ApiAuthentication, app_state=app_state)
    app.openapi = partial(_describe, app)  # type: ignore[method-assign]
    return app


_ROUTES = (
    health,
    runs,
    sessions,
    previews,
    processes,
    session_files,
    ports,
    calls,
    checkpoints,
    call_lives,
    tools,
    skills,
    secrets,
    batches,
    files,
    approvals,
    tenants,
    own_key,
    models,
    usage,
    hosts,
    pressure,
    audit,
)


@cache
def _list_routers() -> Sequence[APIRouter]:
    return [*(routes.router for routes in _ROUTES), pages.build_router()]


@cache
def _build_routes() -> Sequence[BaseRoute]:
    """Return the routes of all applications. Building them takes 0.4 s of processor time, so tests do it once."""
    app = FastAPI(
        default_response_class=ExactJson,
        responses=problem_handlers.responses(),
        openapi_url=None,
        # Generated clients name their functions after it. FastAPI's default also contains the path and the method.
        generate_unique_id_function=lambda route: route.name,
    )
    built_in = len(app.routes)
    for router in _list_routers():
        app.include_router(router)
    return app.routes[built_in:]


def _describe(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI description of the API, with the schema of problems, which no route declares."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        schema["components"]["schemas"]["Problem"] = Problem.model_json_schema()
        app.openapi_schema = schema
    return app.openapi_schema
