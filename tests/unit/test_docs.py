"""The pages of the project lead to one another: every link has an end, and the README names every page."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target, mark in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)", text):
        file = page.parent / target if target else page
        assert file.exists(), f"{page.name} names {target}"
        assert not mark or mark in _marks(file), f"{page.name} names {target}#{mark}"


def test_the_readme_names_every_page() -> None:
    text = (ROOT / "README.md").read_text()
    assert [page.name for page in PAGES if page.parent.name == "docs" and f"(docs/{page.name})" not in text] == []


def _marks(page: Path) -> set[str]:
    """Of its headings, as a browser finds them."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head).strip().lower().replace(" ", "-") for head in heads}
