"""The title that the guest gives itself is the one that the check of a started sandbox expects."""

from pathlib import Path

from toolcrew.workers.sandboxd.runtime.hardening import GUEST_TITLE

GUEST = Path(__file__).parents[4] / "sandbox-images" / "guest"


def test_the_title_is_that_of_the_guest() -> None:
    assert f'TITLE = b"{GUEST_TITLE}"' in (GUEST / "loop.py").read_text()
