"""Conditions under which an embedded stack has its own egress proxy."""

import pytest

from contract.errors import ConfigError
from orchestrator.settings import load_settings


@pytest.mark.parametrize(
    ("classes", "running", "needs"),
    [
        ("", "", False),
        ('{"builders": {"pids": 64}}', "", False),
        ('{"builders": {"network": "none"}}', "", False),
        ('{"a": {}, "builders": {"network": "egress", "egress": {"hosts": ["pypi.org"]}}}', "", True),
        ('{"default": {"network": "egress"}}', "", True),
        ('{"default": {"network": "egress"}}', "/run/egress.sock", False),
    ],
)
def test_a_stack_has_a_proxy_when_a_class_needs_one_and_none_runs(
    classes: str, running: str, needs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOOLCREW_TENANT_CLASSES", classes)
    monkeypatch.setenv("TOOLCREW_EGRESS_SOCKET", running)
    assert load_settings().needs_egress() is needs


@pytest.mark.parametrize("classes", ["{", "[]", '{"a": 1}'])
def test_classes_that_are_none_are_an_error_with_the_name_of_the_variable(
    classes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOOLCREW_TENANT_CLASSES", classes)
    with pytest.raises(ConfigError, match=r"TOOLCREW_|tenant_classes"):
        load_settings()
