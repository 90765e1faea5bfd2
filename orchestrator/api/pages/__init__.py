"""The pages for people: rendered on the server, with little script and no external resources."""

from fastapi import APIRouter

from toolcrew.orchestrator.api.pages import (
    approval_pages,
    batch_pages,
    call_pages,
    front,
    operating,
    overview_page,
    run_pages,
    usage_page,
)
from toolcrew.orchestrator.api.pages.rendering import load_templates


def build_router() -> APIRouter:
    """Build the router of all pages, with compiled templates, so that the first request is not slow."""
    load_templates()
    router = APIRouter()
    for pages in (front, overview_page, run_pages, approval_pages, operating, usage_page, batch_pages, call_pages):
        router.include_router(pages.router)
    return router
