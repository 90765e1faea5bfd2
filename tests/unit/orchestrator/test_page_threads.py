"""Pages are rendered in threads of the tenant whose data they show."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fastapi import Response

from tests.support.stack.waiting import SOON_S
from toolcrew.orchestrator.api.pages import people
from toolcrew.orchestrator.api.pages.people import Person


class Pages:
    def enter(self, _key: str) -> Any:
        return nullcontext()


async def test_a_page_needs_no_thread_that_other_tenants_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(people, "render", lambda template, viewer, **values: Response(template))
    identity = SimpleNamespace(role="tenant", tenant="acme", name="", key_id="k1")
    login = SimpleNamespace(identity=identity, form_token="t")
    person = Person(cast(Any, SimpleNamespace(pages=Pages())), cast(Any, login), "acme", "acme")
    busy = threading.Event()
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    waiting = asyncio.get_running_loop().run_in_executor(None, busy.wait)
    try:
        async with asyncio.timeout(SOON_S):
            response = await person.render("page")
    finally:
        busy.set()
        await waiting
    assert response.body == b"page"
