"""Every promise that SECURITY.md names is in the table of `toolcrew doctor`."""

from pathlib import Path

from tests.unit.test_doctor_promises import build_evidence
from workers.sandboxd.promises import judge
from workers.settings import TenantClass

ROOT = Path(__file__).parents[2]


def test_the_promises_that_security_md_asks_a_host_for_are_rows_of_the_table() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    section = text.partition("| promise | requires |")[2].partition("\n\n")[0]
    named = [name.strip() for line in section.splitlines()[2:] for name in line.split("|")[1].split(",")]

    assert named
    assert set(named) - {row.name for row in judge(build_evidence())} == set()


def test_the_page_of_images_has_every_field_of_a_tenant_class() -> None:
    page = (ROOT / "docs" / "images.md").read_text()
    section = page.partition("## Tenant classes")[2].partition("\n## ")[0]

    assert [name for name in TenantClass.model_fields if f"`{name}`" not in section] == []
