"""The operators' page names every setting of sandboxd, and SECURITY.md no promise that the table does not have."""

import re
from pathlib import Path

from tests.unit.test_doctor_promises import build_evidence
from workers.sandboxd.promises import judge
from workers.settings import SandboxdSettings, TenantClass

ROOT = Path(__file__).parents[2]


def test_every_setting_of_sandboxd_is_on_the_operators_page() -> None:
    page = (ROOT / "docs/operations-sandboxes.md").read_text()

    assert [name for name in SandboxdSettings.model_fields if f"`TOOLCREW_{name.upper()}`" not in page] == []


def test_every_field_of_a_tenant_class_is_on_the_operators_page() -> None:
    page = (ROOT / "docs/operations-sandboxes.md").read_text()
    section = page.partition("## Tenant classes")[2].partition("\n## ")[0]

    assert [name for name in TenantClass.model_fields if f"`{name}`" not in section] == []


def test_the_operators_page_names_no_setting_that_does_not_exist() -> None:
    page = (ROOT / "docs/operations-sandboxes.md").read_text()
    known = {f"TOOLCREW_{name.upper()}" for name in SandboxdSettings.model_fields}

    assert set(re.findall(r"TOOLCREW_[A-Z_]+", page)) - known == set()


def test_the_promises_that_security_md_asks_a_host_for_are_rows_of_the_table() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    section = text.partition("| promise | asks for |")[2].partition("\n\n")[0]
    named = [name.strip() for line in section.splitlines()[2:] for name in line.split("|")[1].split(",")]

    assert named
    assert set(named) - {row.name for row in judge(build_evidence())} == set()
