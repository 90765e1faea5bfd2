"""The documentation: every link has a target, every page is in the menu, and the build of the site makes no network
request.
"""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from scripts import reference
from scripts.pages import log_events

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")), ROOT / "examples" / "README.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_has_a_target(page: Path) -> None:
    """The check follows the files of the repository. The site builder checks the links of the built site."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)", text):
        file = page.parent / target if target else page
        assert file.exists(), f"{page.name} names {target}"
        assert not anchor or anchor in _anchors(file), f"{page.name} names {target}#{anchor}"


def _anchors(page: Path) -> set[str]:
    """Return the anchors of the page's headings, as a browser finds them."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head).strip().lower().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", reference.PAGES, ids=lambda page: page.PAGE)
def test_a_generated_page_matches_the_code(page: ModuleType) -> None:
    assert (ROOT / "docs" / page.PAGE).read_text() == page.build_page(), "run .venv/bin/python scripts/reference.py"


def test_every_log_event_has_a_valid_name_and_a_meaning() -> None:
    assert log_events.find_problems() == []


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. The build fails on a missing anchor, link or menu entry. No network address is reachable during
    the build.
    """
    folder = tmp_path_factory.mktemp("site")
    process = build(ROOT / "mkdocs.yml", folder)
    assert process.returncode == 0, process.stdout + process.stderr
    return folder


def build(config: Path, folder: Path) -> "subprocess.CompletedProcess[str]":
    unreachable_proxies = dict.fromkeys(
        ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), "http://127.0.0.1:9"
    )
    options = ["--strict", "--config-file", str(config), "--site-dir", str(folder)]
    command = [sys.executable, "-m", "mkdocs", "build", *options]
    environment = {**os.environ, **unreachable_proxies, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)


class _ResourceCollector(HTMLParser):
    """Collects the resources that a browser loads for a page without a user's action."""

    def __init__(self) -> None:
        super().__init__()
        self.urls: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        result = dict(attrs)
        if tag == "link" and result.get("rel") != "canonical":
            self.urls.append(result.get("href") or "")
        elif tag in ("script", "img", "iframe", "source", "video", "audio", "embed"):
            self.urls.append(result.get("src") or "")


def test_site_pages_load_only_existing_local_resources(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 25
    for page in pages:
        parser = _ResourceCollector()
        parser.feed(page.read_text())
        for url in filter(None, parser.urls):
            assert not re.match(r"(https?:)?//", url), f"{page.name} loads {url}"
            file = (site / url.lstrip("/") if url.startswith("/") else page.parent / url).resolve()
            assert url.startswith("data:") or file.exists(), f"{page.name} loads {url}"
    for style in site.rglob("*.css"):
        assert re.findall(r"(?:url\(|@import\s*)[\"']?(?:https?:)?//[^)\"']+", style.read_text()) == [], style.name


def test_every_page_of_the_repository_is_in_the_menu_and_the_site(site: Path) -> None:
    menu = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    menu_pages = [page for part in menu for pages in part.values() for entry in pages for page in entry.values()]
    assert len(menu_pages) == len(set(menu_pages))
    docs = {page.name for page in (ROOT / "docs").glob("*.md")}
    assert docs | {"index.md", "security-guarantees.md", "changelog.md", "examples.md"} == set(menu_pages)
    assert [name for name in menu_pages if not (site / name).with_suffix(".html").exists()] == []


def test_a_broken_or_external_file_link_fails_the_site_build(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "page.md").write_text("# A page\n\n[x](missing.md) [x](tools.md#nowhere) [x](../contract/errors.py)\n")
    (docs / "tools.md").write_text("# Tools\n\n## bash_tool\n")
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    other_pages = ["index.md", "security-guarantees.md", "changelog.md", "examples.md"]
    hooks = [str(ROOT / "scripts" / "docs_hooks.py")]
    nav = ["page.md", "tools.md", *other_pages]
    config |= {"hooks": hooks, "nav": nav, "theme": {"name": "mkdocs"}, "plugins": []}
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump(config))
    process = build(tmp_path / "mkdocs.yml", tmp_path / "site")

    assert process.returncode == 1
    for target in ("missing", "nowhere", r"errors\.py"):
        assert re.search(rf"WARNING.*page\.md.*{target}", process.stderr + process.stdout)
