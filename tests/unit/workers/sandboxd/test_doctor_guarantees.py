"""The table of guarantees, evaluated on artificial evidence: those that hold, and broken ones with reason and fix."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolcrew.contract.settings import SandboxdSettings
from toolcrew.contract.tenant_classes import TenantClass
from toolcrew.workers.sandboxd.guarantees import (
    Evidence,
    HostFacts,
    HostGuarantee,
    WorkspaceFacts,
    build_rows,
    is_runc_fixed,
    read_host_facts,
)
from toolcrew.workers.sandboxd.plans import Plans
from toolcrew.workers.sandboxd.runtime.apparmor import ProfileChoice
from toolcrew.workers.sandboxd.runtime.engine import EngineFacts

GIB = 1024**3
ROOT = Path(__file__).parents[4]

GOOD_FACTS = EngineFacts(
    version="27.3.1",
    cgroup_version=2,
    seccomp=True,
    runtimes=("runc", "runsc"),
    kernel="6.8.0-40-generic",
    components={"runc": "1.2.8"},
    security=frozenset({"seccomp", "apparmor", "userns"}),
)
GOOD_HOST = HostFacts(
    kernel="6.8.0-40-generic",
    swaps=(),
    overcommit=0,
    memory_bytes=1024 * GIB,
    inotify_instances=1024,
    smt_active=False,
    ksm_running=False,
)


def build_evidence(
    *,
    facts: dict[str, Any] | None = None,
    host: dict[str, Any] | None = None,
    engine_start: str | None = "TOOLCREW_SANDBOX_START is engine",
    **settings: Any,
) -> Evidence:
    """Return the evidence of a good host, with the given fields replaced."""
    sandboxd_settings = SandboxdSettings(**{"sandbox_image": "ours:1", "sandbox_runtime": "runsc", **settings})
    return Evidence(
        settings=sandboxd_settings,
        host=replace(GOOD_HOST, **(host or {})),
        plans=Plans(sandboxd_settings),
        facts=replace(GOOD_FACTS, **(facts or {})),
        images={"ours:1": "sha256:" + "a" * 64},
        workspaces=WorkspaceFacts("image", is_hard=True),
        engine_start=engine_start,
    )


RUNC = TenantClass(runtime="runc")
UNGUARDED, ROOTLESS = ({"facts": {"security": frozenset(names)}} for names in ((), ("rootless",)))
NO_SWAP_LIMIT = {"facts": {"has_swap_limit": False}}
OLD_RUNC = {"facts": {"components": {"runc": "1.1.5+ds1"}}, "sandbox_runtime": "runc"}


def row_of(evidence: Evidence, name: str) -> HostGuarantee:
    return next(row for row in build_rows(evidence) if row.name == name)


def test_all_guarantees_hold_on_a_good_host() -> None:
    rows = build_rows(build_evidence())

    assert [row.name for row in rows if row.state == "broken"] == ["sandboxes start without the engine"]
    assert [row.name for row in rows if row.state == "unknown"] == ["no known escape"]


def test_the_program_that_starts_sandboxes_is_shown_and_no_advice_rules_it_out() -> None:
    mixed = build_evidence(sandbox_runtime="runc", tenant_classes={"strong": TenantClass(runtime="runsc")})
    own = replace(mixed, own_runtime="crun 1.21", engine_start=None)
    assert row_of(own, "sandboxes start without the engine").why.endswith("crun 1.21")
    assert row_of(own, "profile holds").why.endswith("under crun 1.21, runsc")
    assert not [row for row in build_rows(build_evidence(**UNGUARDED)) if "userns-remap" in row.remedy]
    assert not [row for row in build_rows(own) if "SANDBOX_START" in row.remedy]
    old = replace(own, unmapped="the kernel cannot map owners")
    assert "but the kernel cannot map owners: forks copy" in row_of(old, "sandboxes start without the engine").why


@pytest.mark.parametrize(
    ("choice", "state", "fragment"),
    [
        (ProfileChoice("docker-default"), "holds", "docker-default"),
        (ProfileChoice(obstacle="not loaded"), "broken", "apparmor: not loaded"),
        (ProfileChoice(), "broken", "no profile of apparmor"),
    ],
)
def test_mandatory_access_control_of_own_sandboxes_is_judged_by_their_profile(
    choice: ProfileChoice, state: str, fragment: str
) -> None:
    own = replace(build_evidence(), own_runtime="crun 1.21", engine_start=None, apparmor=choice)
    row = row_of(own, "mandatory access control on files")
    assert (row.state, fragment in row.why) == (state, True)


@pytest.mark.parametrize(
    ("version", "is_fixed"),
    [
        ("1.1.5+ds1", False),
        ("1.1.15", False),
        ("1.2.7", False),
        ("1.2.8", True),
        ("1.2.8-rc.1", False),
        ("1.2.10", True),
        ("1.3.2", False),
        ("1.3.3-0ubuntu1", True),
        ("1.4.0-rc.2", False),
        ("1.4.0-rc.3", True),
        ("1.4.0", True),
        ("1.4.1-rc.1", True),
        ("1.5.0-rc.1", True),
        ("2.0.0", True),
        ("v1.3.4", True),
        ("", None),
        ("unknown", None),
    ],
)
def test_runc_versions_with_the_security_fixes_are_recognized(version: str, is_fixed: bool | None) -> None:
    assert is_runc_fixed(version) is is_fixed


@pytest.mark.parametrize(
    ("name", "changes", "state", "fragment"),
    [
        (
            "sandboxes start without the engine",
            {"engine_start": "sandboxd is not root"},
            "broken",
            "sandboxd is not root",
        ),
        ("system calls are filtered", {"facts": {"seccomp": False}}, "broken", "no seccomp"),
        ("runtimes are installed", {"facts": {"runtimes": ("runc",)}}, "broken", "no runsc"),
        ("mandatory access control on files", UNGUARDED, "broken", "neither AppArmor nor SELinux"),
        ("root in a sandbox is not root on the host", ROOTLESS, "holds", "rootless"),
        ("root in a sandbox is not root on the host", UNGUARDED, "broken", "no user namespace"),
        ("memory and processes are limited", {"facts": {"has_memory_limit": False}}, "broken", "memory"),
        ("memory and processes are limited", NO_SWAP_LIMIT, "holds", "cgroup v2"),
        ("memory and processes are limited", {**NO_SWAP_LIMIT, "host": {"swaps": ("/swap",)}}, "broken", "swap"),
        ("memory suffices for all sandboxes", {"host": {"memory_bytes": 4 * GIB}}, "broken", "4096 MiB"),
        ("memory suffices for all sandboxes", {"host": {"memory_bytes": None}}, "unknown", "cannot be read"),
        ("large programs start", {"host": {"overcommit": 2}}, "broken", "overcommit_memory is 2"),
        ("secrets are not written to disk", {"host": {"swaps": ("/dev/zram0",)}}, "holds", "no swap on a disk"),
        ("secrets are not written to disk", {"host": {"swaps": ("/dev/dm-1",)}}, "unknown", "may be encrypted"),
        ("secrets are not written to disk", {"host": {"swaps": ("/dev/sda2", "/dev/dm-1")}}, "broken", "/dev/sda2"),
        ("secrets are not written to disk", {"host": {"swaps": None}}, "unknown", "cannot be read"),
        ("per-user limits are separate", {"sandbox_runtime": "runc"}, "broken", "1024 inotify instances"),
        ("no shared core or memory page", {"host": {"smt_active": True}}, "broken", "hyper-threads"),
        ("no shared core or memory page", {"host": {"ksm_running": None}}, "unknown", "KSM"),
        ("paths are resolved by the kernel", {"facts": {"kernel": "5.4.0-200"}}, "broken", "no openat2"),
        ("paths are resolved by the kernel", {"facts": {"kernel": "?"}}, "unknown", "?"),
        ("the engine is on this host", {"facts": {"kernel": "6.10.14-linuxkit"}}, "broken", "linuxkit"),
        ("hostile tenants are isolated", {"sandbox_runtime": "runc"}, "broken", "class default"),
        ("hostile tenants are isolated", {"tenant_classes": {"trusted": RUNC}}, "broken", "class trusted:"),
        ("images are present", {"tenant_classes": {"data": TenantClass(image="theirs:2")}}, "broken", "theirs:2"),
        ("no known escape", OLD_RUNC, "broken", "unless your distribution"),
    ],
)
def test_each_missing_host_feature_breaks_its_guarantee_with_a_remedy(
    name: str, changes: dict[str, Any], state: str, fragment: str
) -> None:
    row = row_of(build_evidence(**changes), name)

    assert row.state == state
    assert fragment in row.why
    assert state == "holds" or row.remedy


def test_only_requirements_of_sandboxd_are_marked_as_needed() -> None:
    evidence = build_evidence(
        facts={"seccomp": False, "runtimes": (), "security": frozenset()},
        host={"swaps": ("/dev/sda2",)},
        tenant_classes={"data": TenantClass(image="theirs:2")},
    )

    assert {row.name for row in build_rows(evidence) if row.is_needed and row.state == "broken"} == {
        "system calls are filtered",
        "runtimes are installed",
    }


@pytest.mark.parametrize(
    ("facts", "quota", "persistence"),
    [
        (WorkspaceFacts("image", is_hard=True), "holds", "holds"),
        (WorkspaceFacts("tmpfs", is_hard=True, note="not root"), "holds", "broken"),
        (WorkspaceFacts("folder", is_hard=False, note="not root"), "broken", "holds"),
        (None, "unknown", "unknown"),
    ],
    ids=["image", "tmpfs", "folder", "none"],
)
def test_the_workspace_kind_determines_quota_and_persistence(
    facts: WorkspaceFacts | None, quota: str, persistence: str
) -> None:
    evidence = replace(build_evidence(), workspaces=facts)

    assert row_of(evidence, "workspaces are limited").state == quota
    assert row_of(evidence, "files outlive their sandbox").state == persistence


def test_a_network_class_without_an_egress_proxy_is_broken(tmp_path: Path) -> None:
    classes = {"build": TenantClass(network="egress")}
    evidence = build_evidence(tenant_classes=classes, egress_socket=tmp_path / "proxy")

    assert row_of(evidence, "network follows the class").state == "holds"
    row = row_of(replace(evidence, egress_problem="no such file"), "network follows the class")
    assert (row.state, row.is_needed) == ("broken", False)
    assert "has no network" in row.why


def test_without_an_engine_every_guarantee_is_listed_and_none_assumed() -> None:
    evidence = replace(
        build_evidence(), facts=None, images={}, workspaces=None, problem="the Docker engine does not answer"
    )
    rows = build_rows(evidence)

    assert [row.name for row in rows] == [row.name for row in build_rows(build_evidence())]
    assert {row.name: row.state for row in rows}["engine answers"] == "broken"
    assert {row.name: row.state for row in rows}["system calls are filtered"] == "unknown"


TEXTS = st.text(max_size=30)


@given(
    kernel=TEXTS,
    runc=TEXTS,
    runtimes=st.lists(TEXTS, max_size=4),
    security=st.frozensets(TEXTS),
    swaps=st.none() | st.lists(TEXTS, max_size=3).map(tuple),
    memory=st.none() | st.integers(0, 2**60),
)
def test_any_engine_and_host_facts_give_valid_rows(
    kernel: str,
    runc: str,
    runtimes: list[str],
    security: frozenset[str],
    swaps: tuple[str, ...] | None,
    memory: int | None,
) -> None:
    facts = {"kernel": kernel, "components": {"runc": runc}, "runtimes": tuple(runtimes), "security": security}

    rows = build_rows(
        build_evidence(
            facts=facts, host={"swaps": swaps, "memory_bytes": memory, "kernel": kernel}, sandbox_runtime="runc"
        )
    )

    assert all(row.state in ("holds", "broken", "unknown") and row.why for row in rows)
    assert all(row.remedy for row in rows if row.state != "holds")


def test_host_facts_are_read_or_unknown(tmp_path: Path) -> None:
    for name, text in {
        "proc/sys/kernel/osrelease": "6.8.0\n",
        "proc/swaps": "Filename\tType\tSize\tUsed\tPriority\n/dev/sda2 partition 1 0 -2\n",
        "proc/meminfo": "MemTotal:       2048 kB\nMemAvailable:   1024 kB\nnonsense\n",
        "proc/sys/vm/overcommit_memory": "2\n",
        "sys/kernel/mm/ksm/run": "1\n",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    assert read_host_facts(tmp_path) == HostFacts(
        kernel="6.8.0", swaps=("/dev/sda2",), overcommit=2, memory_bytes=2048 * 1024, ksm_running=True
    )
    assert read_host_facts(tmp_path / "nothing") == HostFacts()


def test_every_host_guarantee_in_security_md_is_checked() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    section = text.partition("| guarantee | requires |")[2].partition("\n\n")[0]
    names = [name.strip() for line in section.splitlines()[2:] for name in line.split("|")[1].split(",")]

    assert names
    assert set(names) - {row.name for row in build_rows(build_evidence())} == set()


def test_docs_images_describes_every_tenant_class_field() -> None:
    page = (ROOT / "docs" / "images.md").read_text()
    section = page.partition("## Tenant classes")[2].partition("\n## ")[0]

    assert [name for name in TenantClass.model_fields if f"`{name}`" not in section] == []
