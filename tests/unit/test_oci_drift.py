"""The check of a started sandbox accepts the title that the guest gives itself, and no other command line."""

from pathlib import Path

import pytest

from workers.sandboxd.runtime import oci_drift

GUEST = Path(__file__).parent.parent.parent / "sandbox-images" / "guest"


@pytest.mark.parametrize(
    ("command", "is_title"),
    [
        (["init"], True),
        (["init", "", ""], True),
        (["init", "--other"], False),
        (["/opt/toolcrew/bin/python3", "-I"], False),
        ([], False),
    ],
)
def test_only_the_title_followed_by_zeros_is_the_title_of_the_guest(command: list[str], *, is_title: bool) -> None:
    assert oci_drift._is_title(command) is is_title


def test_the_title_is_that_of_the_guest() -> None:
    assert f'TITLE = b"{oci_drift.GUEST_TITLE}"' in (GUEST / "loop.py").read_text()
