"""Hooks of MkDocs that add pages from outside docs/ to the site, and convert links between files to links between
pages.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import get_plugin_logger
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

log = get_plugin_logger("toolcrew")

ROOT = Path(__file__).resolve().parent.parent
# File of the repository -> page of the site.
OUTSIDE = {
    "README.md": "index.md",
    "SECURITY.md": "security-guarantees.md",
    "CHANGELOG.md": "changelog.md",
    "examples/README.md": "examples.md",
    "LICENSE": "LICENSE.txt",
}
_INSIDE = {page: file for file, page in OUTSIDE.items()}
_FENCE = re.compile(r"(^```.*?^```[^\n]*$|`[^`\n]+`)", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\((?!https?:|mailto:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are outside the documentation folder."""
    for file, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / file).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    """Return the text of the page with links of the site. A link to a file outside the site logs a warning, which
    fails the build.
    """
    source = page.file.src_uri
    file = _INSIDE.get(source, f"docs/{source}")
    parts = _FENCE.split(markdown)
    return "".join(
        part if number % 2 else _LINK.sub(lambda match: _turned(match, file), part) for number, part in enumerate(parts)
    )


def _turned(match: "re.Match[str]", file: str) -> str:
    target = posixpath.normpath(posixpath.join(posixpath.dirname(file), match[1]))
    mark = match[2] or ""
    if target in OUTSIDE:
        return f"]({OUTSIDE[target]}{mark})"
    if target.startswith("docs/"):
        return f"]({target.removeprefix('docs/')}{mark})"
    log.warning(
        f"{file} links to {match[1]}, which is not a page of the site: write it as `code`, or add it to OUTSIDE of "
        "scripts/docs_hooks.py"
    )
    return match[0]
