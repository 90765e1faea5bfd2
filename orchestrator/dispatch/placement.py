"""Choose the host of a new session by its image, free slots and memory. Each choice compares two random hosts.

If no host reports that it has an image, all orchestrators send the sessions with that image to the same host. The image
is therefore pulled only once, even if several sessions open at the same moment or the reports of the hosts are old.
"""

import hashlib
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from toolcrew.contract.errors import ErrorCode, SandboxUnavailable, ToolFailure
from toolcrew.contract.hosts import RELEASE, HostReport
from toolcrew.contract.image_names import ImageName, ImageNameError, find_matches, is_allowed, parse_image_name
from toolcrew.contract.plurals import plural

LOW_MEMORY_BYTES = 512 * 1024 * 1024
"""Free memory, in bytes, that a host should have. A host with less is chosen only if no other host fits."""
PULL_LOAD = 0.5
"""Load (a share of a host's limits) at which a host counts as busy. A host without the image pulls it only if all hosts
with the image are busy.
"""
MAX_SHOWN_IMAGES = 50
_COMING = ("unhealthy", "restarting")
"""States of a host that may take sessions soon. A worker that has not started yet reports that it is unhealthy."""


class NoHost(SandboxUnavailable):
    """Raised when no host can take the session now. The message names the missing resource. `is_full`: hosts serve that
    could take the session, but all are full. `is_coming`: a host that could take it starts, restarts or waits for its
    sandboxd.
    """

    def __init__(self, message: str, *, is_full: bool, is_coming: bool) -> None:
        super().__init__(message)
        self.is_full = is_full
        self.is_coming = is_coming


@dataclass(frozen=True)
class HostRequirements:
    """Requirements of a session for its host. `image` None: the default image of the class. `memory_bytes`: memory that
    should be free.
    """

    tenant_class: str = "default"
    image: str | None = None
    memory_bytes: int = LOW_MEMORY_BYTES


@dataclass(frozen=True)
class HostCapacity:
    """Capacity of the hosts for sessions of one kind. `at_once`: sessions that can open at the same time. `sandboxes`:
    further sessions that get their own sandbox. `sessions`: further sessions in total. If `sessions` is larger than
    `sandboxes`, some of the sessions must share sandbox capacity in turns.
    """

    at_once: int
    sandboxes: int
    sessions: int


def find_capacity(
    reports: Sequence[HostReport], needs: HostRequirements, placed: Mapping[str, int]
) -> HostCapacity | None:
    """Return how many more sessions the hosts can take; None when no host could ever take the session. In that case
    opening the session raises the reason.
    """
    able = [host for host in reports if host.kind == "sandbox" and _is_able(host, needs)]
    if not able:
        return None
    return HostCapacity(
        # The other half of the slots serves the calls of open sessions.
        at_once=sum(max(1, host.slots // 2) for host in able),
        sandboxes=sum(
            max(0, (host.max_sandboxes or host.max_sessions) - host.sessions - placed.get(host.queue, 0))
            for host in able
        ),
        sessions=sum(max(0, host.max_sessions - host.sessions - placed.get(host.queue, 0)) for host in able),
    )


def choose_host(
    reports: Sequence[HostReport],
    needs: HostRequirements,
    *,
    placed: Mapping[str, int] | None = None,
    excluded: Collection[str] = (),
    chance: random.Random | None = None,
) -> HostReport:
    """Return the less loaded of two random hosts, chosen in proportion to their slots. As reports are seconds
    old, callers would otherwise all choose the same host.

    `placed`: queue -> sessions sent there since its report. `excluded`: queues that have just failed. Raises NoHost
    with the missing resource, ToolFailure for a malformed image name and for an image that no host allows.
    """
    image = _parse_image(needs)
    placed, chance = placed or {}, chance or random.Random()
    hosts = [report for report in reports if report.kind == "sandbox"]
    able = [host for host in hosts if _is_able(host, needs) and host.queue not in excluded]
    hosts_with_room = [host for host in able if host.sessions + placed.get(host.queue, 0) < host.max_sessions]
    if not hosts_with_room:
        _check_image(hosts, needs)
        coming = any(host.state in _COMING and _fits(host, needs) and host.queue not in excluded for host in hosts)
        raise NoHost(_explain(hosts, able, needs), is_full=bool(able), is_coming=coming)
    preferred = [host for host in hosts_with_room if host.memory_free_bytes >= needs.memory_bytes] or hosts_with_room
    preferred = _prefer_image(preferred, image, placed)
    pair = {host.queue: host for host in chance.choices(preferred, weights=[host.slots for host in preferred], k=2)}
    # With few hosts, all are compared: a random pair could miss the host with the lowest load.
    compared = preferred if len(preferred) <= 3 else list(pair.values())
    return min(compared, key=lambda host: (_load(host, placed.get(host.queue, 0)), host.queue))


def _is_able(host: HostReport, needs: HostRequirements) -> bool:
    return host.healthy and not host.draining and _fits(host, needs)


def _fits(host: HostReport, needs: HostRequirements) -> bool:
    """Return whether the host can take the session when it serves."""
    return host.release == RELEASE and needs.tenant_class in host.classes and _allows_image(host, needs)


def _allows_image(host: HostReport, needs: HostRequirements) -> bool:
    try:
        return needs.image is None or is_allowed(host.images, parse_image_name(needs.image))
    except ImageNameError:
        return False


def _parse_image(needs: HostRequirements) -> ImageName | None:
    """Return the image of the session; None for the default image. Raises ToolFailure."""
    try:
        return None if needs.image is None else parse_image_name(needs.image)
    except ImageNameError as error:
        raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, str(error)) from error


def _prefer_image(hosts: list[HostReport], image: ImageName | None, placed: Mapping[str, int]) -> list[HostReport]:
    """Return the hosts that have the image, or else the host that should pull the image. If these hosts are too busy,
    return all hosts.
    """
    if image is None:
        return hosts
    calm = [host for host in hosts if _load(host, placed.get(host.queue, 0)) < PULL_LOAD]
    holding = [host for host in calm if is_allowed(host.images_present, image)]
    if holding:
        return holding
    pulling = [host for host in calm if any(found.names_registry for found in find_matches(host.images, image))]
    return [max(pulling, key=lambda host: _rank(host, image))] if pulling else hosts


def _rank(host: HostReport, image: ImageName) -> bytes:
    """Return the rank of a host for an image (rendezvous hashing). After a host is added, only the images for which the
    new host ranks first change their host.
    """
    return hashlib.blake2b(f"{image.full}\0{host.host}".encode(), digest_size=8).digest()


def _load(host: HostReport, placed: int) -> float:
    """Return the load of a host: the higher of two ratios, its sessions to its session limit, and its sessions plus
    running calls to 8 times its slots.
    """
    sessions = host.sessions + placed
    return max(sessions / max(1, host.max_sessions), (sessions + host.busy) / (host.slots * 8))


def _check_image(hosts: Sequence[HostReport], needs: HostRequirements) -> None:
    if hosts and needs.image is not None and not any(_allows_image(host, needs) for host in hosts):
        allowed = ", ".join(sorted({image for host in hosts for image in host.images})[:MAX_SHOWN_IMAGES])
        raise ToolFailure(
            ErrorCode.INVALID_ARGUMENTS,
            f"image '{needs.image[:200]}' is not allowed on any host; allowed: {allowed}. Use one of these, or ask the "
            "operator to add it to TOOLCREW_SANDBOX_IMAGES_ALLOWED or to the class",
        )


def _explain(hosts: Sequence[HostReport], able: Sequence[HostReport], needs: HostRequirements) -> str:
    if not hosts:
        return (
            "no sandbox host reports: start one with `toolcrew serve worker` next to a sandboxd, or everything with "
            "`toolcrew up`"
        )
    if able:
        full = plural(len(able), "the only host", f"all {len(able)} hosts")
        full += f" that could take the session {plural(len(able), 'is', 'are')} full"
        return f"{full}: try again after sessions were closed, or add a host"
    if all(host.release != RELEASE for host in hosts):
        return f"every host runs another release than this program ({RELEASE}): install the same release on all"
    if not any(needs.tenant_class in host.classes for host in hosts):
        classes = ", ".join(sorted({name for host in hosts for name in host.classes}))
        return f"no host has the tenant class '{needs.tenant_class}'; the hosts have: {classes}"
    none = plural(len(hosts), "the only host takes no sessions", f"none of the {len(hosts)} hosts takes sessions")
    return f"{none} now (draining, unhealthy or lost): see `toolcrew hosts list`"
