"""Fixtures of the scenarios: a guest that the tests of a file share, and the tools over it."""

from tests.support.guest.guest_tools import guest, shared_guest, tools  # noqa: F401  # fixtures
