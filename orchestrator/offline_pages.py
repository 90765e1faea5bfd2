"""Pages that work offline: one file each, without scripts and external resources.

Security: the pages contain untrusted text. Templates escape every value, and the Content-Security-Policy of a page
forbids scripts and external resources, even if an escape were missing.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from toolcrew.orchestrator.terminal.figures import one_line
from toolcrew.orchestrator.terminal.text import escape_controls


def render_page(template: str, **values: Any) -> str:
    """Return a page. Raises an error for a value that the template needs and that is missing."""
    return _environment().get_template(template).render(values)


def load_template(template: str) -> Template:
    """Return a template of this package by its file name, for pages that are built from parts."""
    return _environment().get_template(template)


def _format_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=1)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # A control or direction character of untrusted text becomes visible. `line` also cuts the text and keeps one line.
    environment.filters |= {"line": one_line, "text": escape_controls, "json": _format_json}
    return environment
