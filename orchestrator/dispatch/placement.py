"""On which host a new session is opened: by free slots and memory, two looked at for each."""

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from contract.errors import ErrorCode, SandboxUnavailable, ToolFailure
from contract.hosts import RELEASE, HostReport

LOW_MEMORY_BYTES = 512 * 1024 * 1024
"""Hosts with less are taken only when there is no other."""


class NoHost(SandboxUnavailable):
    """No host can take the session now."""


@dataclass(frozen=True)
class Wanted:
    """What a session needs of its host. `image` None: whatever the class begins with."""

    tenant_class: str = "default"
    image: str | None = None


@dataclass(frozen=True)
class HostRoom:
    """What hosts have for sessions of one kind now. `at_once`: openings at a time that keep them busy; `sandboxes`:
    sessions that each get a sandbox of their own; `sessions`: those that are taken at all, whose sandboxes then take
    turns."""

    at_once: int
    sandboxes: int
    sessions: int


def find_room(reports: Sequence[HostReport], wanted: Wanted, placed: Mapping[str, int]) -> HostRoom | None:
    """For work that can wait until there is some. None when no host could ever take it: opening a session tells why."""
    able = [host for host in reports if host.kind == "sandbox" and _is_able(host, wanted)]
    if not able:
        return None
    return HostRoom(
        # The other half is for the calls of the sessions that are there.
        at_once=sum(max(1, host.slots // 2) for host in able),
        sandboxes=sum(
            max(0, (host.max_sandboxes or host.max_sessions) - host.sessions - placed.get(host.queue, 0))
            for host in able
        ),
        sessions=sum(max(0, host.max_sessions - host.sessions - placed.get(host.queue, 0)) for host in able),
    )


def choose_host(
    reports: Sequence[HostReport],
    wanted: Wanted,
    *,
    placed: Mapping[str, int] | None = None,
    excluded: Collection[str] = (),
    chance: random.Random | None = None,
) -> HostReport:
    """The less loaded of two hosts picked by chance, by their slots. Deciding so on reports that are seconds old does
    not send everybody to one host.

    `placed`: queue -> sessions sent there since its report; `excluded`: queues that have just failed. Raises NoHost
    that says what is missing, ToolFailure for an image that no host allows.
    """
    placed, chance = placed or {}, chance or random.Random()
    hosts = [report for report in reports if report.kind == "sandbox"]
    able = [host for host in hosts if _is_able(host, wanted) and host.queue not in excluded]
    room = [host for host in able if host.sessions + placed.get(host.queue, 0) < host.max_sessions]
    if not room:
        _check_image(hosts, wanted)
        raise NoHost(_explain(hosts, able, wanted))
    roomy = [host for host in room if host.memory_free_bytes >= LOW_MEMORY_BYTES] or room
    pair = {host.queue: host for host in chance.choices(roomy, weights=[host.slots for host in roomy], k=2)}
    # Few hosts: all are looked at, or chance would pick the fuller one every now and then for nothing.
    looked_at = roomy if len(roomy) <= 3 else list(pair.values())
    return min(looked_at, key=lambda host: (_load(host, placed.get(host.queue, 0)), host.queue))


def _is_able(host: HostReport, wanted: Wanted) -> bool:
    return (
        host.release == RELEASE
        and host.healthy
        and not host.draining
        and wanted.tenant_class in host.classes
        and (wanted.image is None or wanted.image in host.images)
    )


def _load(host: HostReport, placed: int) -> float:
    """How far a host is used up: by sessions a slot, by sessions of its most, and by calls that run now."""
    sessions = host.sessions + placed
    return max(sessions / max(1, host.max_sessions), (sessions + host.busy) / (host.slots * 8))


def _check_image(hosts: Sequence[HostReport], wanted: Wanted) -> None:
    if hosts and wanted.image is not None and not any(wanted.image in host.images for host in hosts):
        known = ", ".join(sorted({image for host in hosts for image in host.images}))
        raise ToolFailure(
            ErrorCode.INVALID_ARGUMENTS, f"image '{wanted.image[:200]}' is not allowed on any host; allowed: {known}"
        )


def _explain(hosts: Sequence[HostReport], able: Sequence[HostReport], wanted: Wanted) -> str:
    if not hosts:
        return (
            "no sandbox host reports: start one with `toolcrew serve worker` beside a sandboxd, or everything with "
            "`toolcrew up`"
        )
    if able:
        return (
            f"all {len(able)} hosts that could take the session are full: try again when sessions were closed, or add "
            "a host"
        )
    if all(host.release != RELEASE for host in hosts):
        return f"every host runs another release than this program ({RELEASE}): run the same on all"
    if not any(wanted.tenant_class in host.classes for host in hosts):
        known = ", ".join(sorted({name for host in hosts for name in host.classes}))
        return f"no host knows the tenant class '{wanted.tenant_class}'; they know: {known}"
    return (
        f"none of the {len(hosts)} hosts takes sessions now (draining, silent, or just lost): see `toolcrew hosts list`"
    )
