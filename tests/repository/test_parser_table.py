"""The table of parsers of untrusted data in docs/security.md: every kind of data has a row, and every row names
existing tests.
"""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KINDS = (
    "YAML",
    "tar",
    "zip",
    "JSON Schema",
    "JSON arguments",
    "batch lines",
    "HTML",
    "PDF",
    "XML",
    "SSE",
    "frames",
    "git bundles",
    "ipynb",
    "native tool calls",
    "egress proxy",
    "web JSON",
)


def read_rows() -> list[list[str]]:
    table = (ROOT / "docs/security.md").read_text().partition("## Parsers of foreign data")[2]
    rows = [line.strip("|").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row] for row in rows[1:]]


def test_every_kind_of_foreign_data_has_a_row() -> None:
    named = [row[0] for row in read_rows()]
    assert [kind for kind in KINDS if not any(kind in name for name in named)] == []


def test_every_row_names_tests_that_exist() -> None:
    for row in read_rows():
        tests = re.findall(r"`(tests/[a-z_/]+\.py)::(\w+)`", row[4])
        assert tests, row[0]
        for file, name in tests:
            assert re.search(rf"^(async )?def {name}\(", (ROOT / file).read_text(), re.MULTILINE), (row[0], file, name)
