"""The parser for a guest's report about its sandbox. It accepts only fields of the protocol."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolcrew.contract.errors import SandboxUnavailable
from toolcrew.workers.sandboxd.disks.base import WorkspaceSize
from toolcrew.workers.sandboxd.factory import StartCheck, WorkspaceNotMounted
from toolcrew.workers.sandboxd.plans import SandboxPlan
from toolcrew.workers.sandboxd.runtime.attestation import ask_attestation, find_misfits, parse_attestation

MIB = 1024 * 1024
CLEAN: dict[str, Any] = {
    "processes": 0,
    "zombies": 0,
    "jobs": 0,
    "entries": {"workspace": 0, "tmp": 0, "output": 0, "shm": 0},
    "workspace": {"bytes": 256 * MIB, "inodes": 65_536, "type": "tmpfs"},
}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


def with_value(path: str, value: object) -> dict[str, Any]:
    """Return the clean answer with one field, `a` or `a.b`, replaced."""
    outer, _, inner = path.partition(".")
    return {**CLEAN, outer: {**CLEAN[outer], inner: value} if inner else value}


FIELDS = [name for name in CLEAN if name not in ("entries", "workspace")]
FIELDS += [f"{outer}.{inner}" for outer in ("entries", "workspace") for inner in CLEAN[outer]]


@pytest.mark.parametrize("field", FIELDS)
@given(value=JSON)
def test_any_field_value_is_parsed_or_refused(field: str, value: object) -> None:
    try:
        attestation = parse_attestation(with_value(field, value))
    except ValueError:
        return
    counts = [
        attestation.processes,
        attestation.zombies,
        attestation.jobs,
        attestation.workspace_bytes,
        attestation.workspace_inodes,
        *attestation.entries.values(),
    ]
    assert all(type(count) is int and count >= 0 for count in counts)
    assert len(attestation.workspace_type) <= 40


@given(JSON.filter(lambda value: isinstance(value, dict)))
def test_an_arbitrary_object_is_refused(done: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        parse_attestation(done)


@pytest.mark.parametrize("value", [True, -1, 1.0, "0", None, 2**63])
def test_a_field_that_is_not_a_count_is_refused(value: object) -> None:
    with pytest.raises(ValueError):
        parse_attestation(with_value("processes", value))


class ReportingGuest:
    """A guest that returns the given answer."""

    def __init__(self, done: dict[str, Any]) -> None:
        self.done = done

    async def ask(self, request: Mapping[str, Any], /) -> dict[str, Any]:
        assert request["op"] == "attest"
        return self.done


async def test_an_invalid_guest_report_makes_the_sandbox_unavailable() -> None:
    for done in ({**CLEAN, "error": {"code": "INTERNAL", "message": "no"}}, with_value("jobs", "none")):
        with pytest.raises(SandboxUnavailable, match=r"sent no valid report about its sandbox .*build its image again"):
            await ask_attestation(ReportingGuest(done))


SIZE = WorkspaceSize(256 * MIB, 65_536)
PLAN = SandboxPlan("acme/tools:1", "runc", "none", SIZE.bytes, SIZE.inodes, 128 * MIB, cpus=1.0, pids=64)


async def test_an_image_without_a_mounted_workspace_is_refused_every_time() -> None:
    """An example is an image whose /tmp is a link to /workspace: files in /tmp would be lost with the container."""
    check, guest = (
        StartCheck(is_hard=True),
        ReportingGuest(with_value("workspace", {"bytes": 64 * MIB, "inodes": 65_536, "type": "tmpfs"})),
    )
    for _ in range(2):
        with pytest.raises(
            WorkspaceNotMounted, match=r"image acme/tools:1 does not have its workspace: .*must be folders in an image"
        ):
            await check.check(PLAN, SIZE, guest)


async def test_an_image_is_checked_once_per_runtime() -> None:
    check = StartCheck(is_hard=True)
    await check.check(PLAN, SIZE, ReportingGuest(CLEAN))
    await check.check(PLAN, SIZE, ReportingGuest({}))
    with pytest.raises(SandboxUnavailable):
        await check.check(replace(PLAN, runtime="runsc"), SIZE, ReportingGuest({}))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bytes": 500 * 1024 * MIB, "type": "overlay"}, "its quota is not in force"),
        ({"inodes": 10**7}, "its quota is not in force"),
        ({"bytes": 64 * MIB}, "fewer than"),
        ({"inodes": 100}, "fewer than"),
    ],
)
def test_a_workspace_size_that_differs_from_the_plan_is_reported(fields: dict[str, object], message: str) -> None:
    attestation = parse_attestation({**CLEAN, "workspace": {**CLEAN["workspace"], **fields}})
    (sentence,) = find_misfits(attestation, 256 * MIB, 65_536)
    assert message in sentence
