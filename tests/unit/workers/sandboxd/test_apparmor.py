"""The choice of the AppArmor profile of sandboxes, from fake files of the kernel."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.workers.sandboxd.test_doctor_guarantees import GOOD_FACTS
from tests.unit.workers.sandboxd.test_oci_bundle import BASE, build_spec, bundle
from toolcrew.workers.sandboxd.runtime.apparmor import PROFILE, choose_profile, read_label
from toolcrew.workers.sandboxd.runtime.bundle import build_bundle

LOADED = "/usr/bin/man (enforce)\ndocker-default (enforce)\n"
OTHERS = "crun (unconfined)\ndocker-default-of-others (enforce)\n"
WITHOUT = replace(GOOD_FACTS, security=frozenset({"seccomp"}))


def write_kernel(root: Path, enabled: str | None, profiles: str | None) -> Path:
    """Write the files of a kernel. Return its folder of a thread."""
    task = root / "proc/thread-self"
    files = {
        root / "module/apparmor/parameters/enabled": enabled,
        root / "kernel/security/apparmor/profiles": profiles,
        task / "attr/apparmor/exec": "",
    }
    for file, text in files.items():
        if text is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
    return task


@pytest.mark.parametrize(
    ("enabled", "profiles", "engine_has_it", "is_used", "obstacle"),
    [
        ("Y\n", LOADED, True, True, ""),
        ("Y\n", OTHERS, True, False, PROFILE),
        ("Y\n", None, True, True, ""),
        ("Y\n", None, False, False, PROFILE),
        ("N\n", LOADED, True, False, ""),
        (None, None, False, False, ""),
    ],
    ids=["loaded", "not loaded", "list hidden", "list hidden, engine without", "disabled", "no AppArmor"],
)
def test_profile_is_used_where_the_kernel_has_it(
    tmp_path: Path, enabled: str | None, profiles: str | None, engine_has_it: bool, is_used: bool, obstacle: str
) -> None:
    task = write_kernel(tmp_path, enabled, profiles)
    choice = choose_profile(GOOD_FACTS if engine_has_it else WITHOUT, tmp_path, task)

    assert choice.profile == (PROFILE if is_used else None)
    assert obstacle in (choice.obstacle or "")
    assert (choice.obstacle is not None) == bool(obstacle)
    assert (task / "attr/apparmor/exec").read_text() == ("exec unconfined" if is_used else "")


def test_profile_is_not_used_where_sandboxd_may_not_leave_its_own(tmp_path: Path) -> None:
    task = write_kernel(tmp_path, "Y\n", LOADED)
    (task / "attr/apparmor/exec").unlink()
    (task / "attr/apparmor/exec").mkdir()
    choice = choose_profile(GOOD_FACTS, tmp_path, task)
    assert choice.profile is None
    assert "may not change the profile" in (choice.obstacle or "")


def test_bundle_names_the_profile_only_where_it_is_used() -> None:
    own = build_bundle(
        build_spec(), root=Path("/mnt/x"), cgroup="/toolcrew/x", base=BASE, seccomp_bpf=None, apparmor=PROFILE
    )
    assert own["process"].pop("apparmorProfile") == PROFILE
    assert own["process"] == bundle()["process"]


def test_label_is_read_and_a_process_without_it_is_drift(tmp_path: Path) -> None:
    (tmp_path / "attr/apparmor").mkdir(parents=True)
    (tmp_path / "attr/apparmor/current").write_text("docker-default (enforce)\n")
    assert read_label(tmp_path) == "docker-default (enforce)"
