"""The pages that people look at: server-rendered, little script, nothing from elsewhere."""

from fastapi import APIRouter

from orchestrator.api.pages import approval_pages, batch_pages, call_pages, front, operating, overview_page, run_pages
from orchestrator.api.pages.rendering import load_templates


def build_router() -> APIRouter:
    """All of them, ready to be shown: whoever looks first does not wait for templates to be read."""
    load_templates()
    router = APIRouter()
    for pages in (front, overview_page, run_pages, approval_pages, operating, batch_pages, call_pages):
        router.include_router(pages.router)
    return router
