"""Renders pages from templates. All values are escaped, and a missing name is an error."""

import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from fastapi import Response
from fastapi.responses import HTMLResponse
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from toolcrew.contract.clock import format_instant
from toolcrew.contract.plurals import plural
from toolcrew.orchestrator.api.pages.untrusted_text import build_json, count_suspicious, reveal, reveal_exactly, shorten
from toolcrew.orchestrator.terminal.figures import format_count, format_seconds

FOLDER = Path(__file__).parent
_AGES = ((1, "s", 60), (60, "min", 3600), (3600, "h", 172_800), (86_400, "d", float("inf")))
"""Units in which an age is shown: seconds in the unit, name of the unit, and the age in seconds below which the unit is
used.
"""
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


@dataclass(frozen=True)
class Viewer:
    """Viewer of a page. `tenant`: the tenant that the page shows; None: all tenants, for operators.

    `tenants`: the tenants that the viewer can select.
    """

    name: str
    role: str
    tenant: str | None
    form_token: str
    tenants: tuple[str, ...] = ()

    @property
    def is_operator(self) -> bool:
        return self.role != "tenant"


def render(template: str, viewer: Viewer | None, *, status: int = 200, **values: Any) -> HTMLResponse:
    """Render a page, or a part of a page, as a response."""
    return HTMLResponse(build(template, viewer, **values), status_code=status)


def build(template: str, viewer: Viewer | None, **values: Any) -> str:
    """Render a template as HTML text. A lone surrogate, which UTF-8 cannot encode, becomes a question mark."""
    text = environment().get_template(template).render(viewer=viewer, url=_Addresses(viewer), **values)
    return text.encode("utf-8", "replace").decode()


def render_error(status: int, code: str, sentence: str) -> Response:
    """Render an error as a page. The page names no person, because the client may not be logged in."""
    title = HTTPStatus(status).phrase
    return render("error.html", None, status=status, title=title, code=code, sentence=sentence[:2000], page="")


@cache
def environment() -> Environment:
    """Return the template environment with its filters and functions."""
    templates = Environment(
        loader=FileSystemLoader(FOLDER / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters |= {
        "reveal": reveal,
        "exactly": reveal_exactly,
        "ago": _ago,
        "until": _until,
        "day": lambda at: format_instant(at)[:10],
        "seconds": lambda value: format_seconds(max(0.0, float(value))),
        "count": lambda value: format_count(int(value)),
        "counted": lambda value, one, many="": f"{int(value):,} {plural(int(value), one, many)}",
        "bytes": _bytes,
        "json": build_json,
        "part": lambda value: quote(str(value), safe=""),
    }
    templates.globals |= {
        "static": static_address,
        "count_suspicious": count_suspicious,
        "shorten": shorten,
        "now": lambda: format_instant(time.time(), "milliseconds"),
    }
    return templates


def load_templates() -> None:
    """Read and compile every template."""
    for name in environment().list_templates():
        environment().get_template(name)


@cache
def static_files() -> Mapping[str, bytes]:
    """Return the static files of the pages by name."""
    return {file.name: file.read_bytes() for file in sorted((FOLDER / "static").iterdir()) if file.is_file()}


def static_address(name: str) -> str:
    """Return the address of a static file.

    The address contains a digest of the file, so that browsers may cache the file for a long time.
    """
    return f"/static/{name}?v={hashlib.sha256(static_files()[name]).hexdigest()[:12]}"


class _Addresses:
    """Function `url(path part, ..., name=value)` of templates: an address that keeps the selected tenant.

    Values that are None or "" are left out. For viewers with only one tenant, the parameters `tenant` and `of` (the
    owner of the shown object) are left out too.
    """

    def __init__(self, viewer: Viewer | None) -> None:
        self._viewer = viewer

    def __call__(self, *path: str, **query: Any) -> str:
        shared: dict[str, Any] = {"tenant": self._viewer.tenant} if self._viewer is not None else {}
        shared |= query
        if self._viewer is None or not self._viewer.is_operator:
            shared |= {"tenant": None, "of": None}
        return address(*path, **shared)


def address(*path: str, **query: Any) -> str:
    """Return an address of this site, with quoted parts."""
    present = {name: value for name, value in query.items() if value not in (None, "")}
    url_path = "/" + "/".join(quote(part, safe="") for part in path)
    return f"{url_path}?{urlencode(present)}" if present else url_path


def _ago(at: float | None) -> Markup:
    """Show how long ago a time was. The title contains the time itself. The script of the page updates the age."""
    if not at:
        return Markup("")
    text = format_instant(at, "milliseconds")
    return Markup('<time class="ago" datetime="{0}" title="{0}">{1}</time>').format(text, _age(time.time() - at))


def _age(seconds: float) -> str:
    """Return an age in whole units, like `formatAge` in page.js."""
    size, unit = next((size, unit) for size, unit, below in _AGES if seconds < below)
    return f"{int(max(0.0, seconds) // size)} {unit} ago"


def _until(at: float | None) -> Markup:
    if not at:
        return Markup("")
    remaining_s = at - time.time()
    return Markup('<time datetime="{0}" title="{0}">{1}</time>').format(
        format_instant(at), format_seconds(remaining_s) if remaining_s > 0 else "no time"
    )


def _bytes(size: float) -> str:
    value = float(size)
    for unit in _UNITS:
        if value < 1024 or unit == _UNITS[-1]:
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
