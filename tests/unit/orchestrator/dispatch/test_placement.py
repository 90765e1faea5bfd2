"""The choice of a host for a session: never a host without capacity, and an even spread over the others."""

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.sandboxd.fake_hosts import build_report
from toolcrew.contract.errors import ErrorCode, SandboxUnavailable, ToolFailure
from toolcrew.contract.hosts import HostReport
from toolcrew.orchestrator.dispatch.placement import LOW_MEMORY_BYTES, HostRequirements, choose_host, find_capacity

GIB = 1024**3


@given(
    st.lists(st.tuples(st.integers(0, 100), st.booleans(), st.booleans(), st.integers(0, 2 * GIB)), max_size=12),
    st.integers(),
)
def test_full_unhealthy_or_draining_host_is_never_chosen(hosts: list[tuple[int, bool, bool, int]], seed: int) -> None:
    reports = [
        build_report(f"h{at}", sessions=sessions, healthy=healthy, draining=draining, memory_free_bytes=memory)
        for at, (sessions, healthy, draining, memory) in enumerate(hosts)
    ]
    able = [
        report for report in reports if report.healthy and not report.draining and report.sessions < report.max_sessions
    ]
    if not able:
        with pytest.raises(SandboxUnavailable):
            choose_host(reports, HostRequirements(), chance=random.Random(seed))
        return
    chosen = choose_host(reports, HostRequirements(), chance=random.Random(seed))
    assert chosen in able
    if any(report.memory_free_bytes >= LOW_MEMORY_BYTES for report in able):
        assert chosen.memory_free_bytes >= LOW_MEMORY_BYTES


def test_sessions_spread_evenly_with_outdated_reports() -> None:
    """All are placed by one report, as a burst within three seconds is."""
    reports, placed, chance = [build_report(f"h{at}") for at in range(10)], Counter[str](), random.Random(7)
    for _ in range(500):
        placed[choose_host(reports, HostRequirements(), placed=placed, chance=chance).queue] += 1
    assert max(placed.values()) - min(placed.values()) <= 8


def test_independent_programs_spread_over_different_hosts() -> None:
    reports, chance, both = [build_report(f"h{at}") for at in range(10)], random.Random(7), Counter[str]()
    for _ in range(2):
        placed = Counter[str]()
        for _ in range(100):
            placed[choose_host(reports, HostRequirements(), placed=placed, chance=chance).queue] += 1
        both += placed
    assert max(both.values()) <= 40


@pytest.mark.parametrize(
    ("fields", "requirements", "message"),
    [
        ({"classes": ("gold",)}, HostRequirements("silver"), "tenant class 'silver'; the hosts have: gold"),
        ({"release": "0"}, HostRequirements(), "runs another release"),
        ({"sessions": 100}, HostRequirements(), "is full"),
        ({"draining": True}, HostRequirements(), "the only host takes no sessions now"),
    ],
    ids=["class", "release", "full", "draining"],
)
def test_the_error_explains_why_no_host_fits(
    fields: dict[str, Any], requirements: HostRequirements, message: str
) -> None:
    with pytest.raises(SandboxUnavailable, match=message):
        choose_host([build_report("a", **fields)], requirements)


@pytest.mark.parametrize(
    ("image", "message"), [("odd", "not allowed on any host; allowed: base"), ("No Such", "invalid")]
)
def test_image_not_allowed_or_malformed_is_invalid_arguments(image: str, message: str) -> None:
    with pytest.raises(ToolFailure, match=message) as refused:
        choose_host([build_report("a", images=("base",))], HostRequirements(image=image))
    assert refused.value.code is ErrorCode.INVALID_ARGUMENTS
    assert find_capacity([build_report("a", images=("base",))], HostRequirements(image=image), {}) is None


def test_idle_host_is_preferred_to_a_busy_host() -> None:
    reports = [build_report("a", busy=4), build_report("b")]
    assert choose_host(reports, HostRequirements()).host == "b"


def test_excluded_host_is_not_chosen() -> None:
    reports = [build_report("a"), build_report("b", sessions=90)]
    assert choose_host(reports, HostRequirements(), excluded={"host.a.b00t"}).host == "b"


@pytest.mark.parametrize("image", ["docker.io/library/base", "base:latest", "ghcr.io/team/tool:v1"])
def test_image_is_allowed_by_equal_name_or_pattern(image: str) -> None:
    report = build_report("a", images=("base", "ghcr.io/team/*"))
    assert choose_host([report], HostRequirements(image=image)).host == "a"
    assert find_capacity([report], HostRequirements(image=image), {}) is not None


def test_host_with_the_image_is_preferred_until_busy() -> None:
    allowed = {"images": ("ghcr.io/team/*",)}
    others = [build_report(f"h{at}", **allowed) for at in range(5)]
    needs = HostRequirements(image="ghcr.io/team/tool")
    for sessions, is_preferred in ((0, True), (40, True), (60, False)):
        has = build_report("has", images_present=("ghcr.io/team/tool:latest",), sessions=sessions, slots=16, **allowed)
        hosts = {choose_host([*others, has], needs, chance=random.Random(seed)).host for seed in range(20)}
        assert (hosts == {"has"}) == is_preferred


def test_missing_image_is_placed_on_one_host_until_busy() -> None:
    hosts = [build_report(f"h{at}", images=("ghcr.io/team/*",), slots=16) for at in range(5)]
    hosts_by_image = {image: find_hosts(hosts, f"ghcr.io/team/i{image}") for image in range(100)}
    assert all(len(home) == 1 for home in hosts_by_image.values())
    assert max(Counter(home for (home,) in hosts_by_image.values()).values()) <= 35
    # A host that is lost moves only its own images.
    fewer = [host for host in hosts if host.host != "h0"]
    assert all(
        find_hosts(fewer, f"ghcr.io/team/i{image}") == home for image, home in hosts_by_image.items() if home != {"h0"}
    )
    (home,) = hosts_by_image[0]
    placed = {f"host.{home}.b00t": 60}
    assert len(find_hosts(hosts, "ghcr.io/team/i0", placed) - {home}) == 1


def find_hosts(hosts: list[HostReport], image: str, placed: dict[str, int] | None = None) -> set[str]:
    """Return the hosts that sessions of an image get."""
    needs = HostRequirements(image=image)
    return {choose_host(hosts, needs, placed=placed, chance=random.Random(seed)).host for seed in range(40)}


def test_capacity_counts_only_hosts_that_can_take_the_session() -> None:
    reports = [
        build_report("a", sessions=98, slots=16),
        build_report("b", sessions=10, slots=1),
        build_report("drains", draining=True),
        build_report("w", kind="web"),
    ]
    room = find_capacity(reports, HostRequirements(), {"host.a.b00t": 1})
    first = build_report("a")
    assert (room.at_once, room.sandboxes) == (9, 2 * first.max_sandboxes - 98 - 1 - 10)
    assert room.sessions == 2 * first.max_sessions - 98 - 1 - 10
