"""Redis users, one per role, as the lines of an ACL file: each part of a deployment gets only the rights that it
needs.

The rules are for Redis 6.2, which cannot separate reading a key from writing it, nor subscribing from publishing.
docs/security.md lists the consequences, and how the rules were found.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from toolcrew.contract.errors import ConfigError
from toolcrew.contract.names import HUB_SHARDS, deployment_key, result_channel_pattern

# Commands that read beyond a user's own keys, or change the server. `@dangerous` includes KEYS, FLUSHALL, CONFIG,
# DEBUG, SHUTDOWN and similar commands.
_NEVER = "-@dangerous -@admin -scan -randomkey -dbsize -swapdb -move -copy -client -script -pubsub"
_BASE = "+@connection +@read +@write +@transaction +@pubsub +eval +evalsha +time +select"
# A server does not start with the name of a subcommand that it does not know. Redis 7.0 knows all of these.
_SPARED = "+client|setname +client|getname +client|id +script|load +script|exists"
_PIDBOX = "/0.celery.pidbox"
_EVENTS_OF_WORKERS = ("/0.celeryev/*", "/0.celeryev/worker.*", "/0.celeryev/task.*")


@dataclass(frozen=True)
class Role:
    """Redis user of one part of a deployment. `own` and `own_channels`: patterns of keys and channels of the
    deployment, without its prefix. `keys` and `channels`: patterns of other keys and channels. `purpose`: the programs
    that use the user.
    """

    name: str
    purpose: str
    own: tuple[str, ...]
    keys: tuple[str, ...]
    channels: tuple[str, ...]
    commands: str
    own_channels: tuple[str, ...] = ()


def _of_queues(pattern: str) -> tuple[str, ...]:
    """Return the keys of workers that serve queues of this kind: their reports, the marks of lost workers, and their
    slots.
    """
    return (f"host:{pattern}", f"tombstone:{pattern}", f"slots:{pattern}")


# Keys of every worker: its report, the state and the usage of its calls, and the tenants and switches that it reads.
_WORKERS_OWN = (
    "hosts",
    "refusals",
    "tenants",
    "switches",
    "listener:*",
    "t:*:call.*",
    "t:*:usage.*",
    "t:*:session.*:usage",
    "t:*:memory",
)
# Keys of workers with a sandboxd: locations of sessions, the state of tools, installed skills and secrets of tenants,
# and the audit of their uses.
_SANDBOXES_OWN = (
    "catalog:sandbox*",
    "t:*:session.*:place",
    "t:*:session.*:state",
    "t:*:places",
    "t:*:skills",
    "t:*:skill-bundle.*",
    "t:*:secrets",
    "t:*:audit",
    "t:*:blob-sandbox.*",
)
# Keys of Celery: bindings, unacknowledged messages, answers to inspections, stored results.
_WORKERS_KEYS = ("_kombu.binding*", "unacked*", "*.celery.pidbox*", "celery-task-meta-*")
_WORKERS_CHANNELS = ("celery-task-meta-*", _PIDBOX, *_EVENTS_OF_WORKERS)
_PLAIN = f"{_BASE} {_NEVER} {_SPARED}"

ROLES: dict[str, Role] = {
    role.name: role
    for role in (
        Role(
            "orchestrator",
            "programs that send calls: `toolcrew`, ToolClient, batch, the API",
            ("*",),
            ("host.*", "pool.*", "celery-task-meta-*"),
            # The orchestrator reports lost calls to Flower in place of a dead worker.
            (*(result_channel_pattern(shard) for shard in HUB_SHARDS), "/0.celeryev/task.failed"),
            # INFO gives the memory use, which operators monitor (docs/metrics.md).
            f"{_PLAIN} +info",
            own_channels=("admission:*",),
        ),
        Role(
            "worker",
            "workers with a sandboxd",
            (*_WORKERS_OWN, *_of_queues("host.*"), *_SANDBOXES_OWN, "metrics", "metrics:counted.*"),
            ("host.*", *_WORKERS_KEYS),
            _WORKERS_CHANNELS,
            # INFO gives the memory use, which limits what a tenant stores (store/memory.py).
            f"{_PLAIN} +info",
        ),
        Role(
            "web",
            "workers of the kind web: web tools and operators' tools",
            (
                *_WORKERS_OWN,
                *_of_queues("pool.*"),
                "catalog:web*",
                "catalog:tools*",
                "t:*:session.*:state",
                "t:*:session.*:mcp",
                "t:*:web.*",
                "t:*:blob-web.*",
            ),
            ("pool.*", *_WORKERS_KEYS),
            _WORKERS_CHANNELS,
            # INFO gives the memory use; it limits what a tenant stores, and pages are stored only while memory is free.
            f"{_PLAIN} +info",
        ),
        Role(
            "streams",
            "stream gateways: their own records and the time",
            ("stream-gateway:host.*",),
            (),
            (),
            f"+@connection +get +set +del +exists +time +select {_NEVER} {_SPARED}",
        ),
        Role(
            "flower",
            "Flower: events, and answers of workers; no queue, no result, no key of this project",
            (),
            ("_kombu.binding*", "*.reply.celery.pidbox*", "celeryev.*", "flower.*"),
            (_PIDBOX, *_EVENTS_OF_WORKERS),
            _PLAIN,
        ),
        Role("admin", "the operator, for manual work: all rights", ("*",), ("*",), ("*",), "+@all"),
    )
}


def build_users(deployment: str, hashes: Mapping[str, str]) -> str:
    """Return the lines of an ACL file. `hashes`: role -> SHA-256 of its password in hex. The default user is off.

    Raises ConfigError for an unknown role.
    """
    unknown = sorted(hashes.keys() - ROLES.keys())
    if unknown:
        raise ConfigError(f"the role '{unknown[0]}' does not exist: use one of {', '.join(ROLES)}")
    lines = ["user default off resetpass resetkeys resetchannels -@all"]
    lines += [_user_line(ROLES[name], deployment, digest) for name, digest in hashes.items()]
    return "".join(f"{line}\n" for line in lines)


def hash_password(password: str) -> str:
    """Return the password's hash in Redis's format. Passwords are random and long, so a fast hash is enough."""
    return hashlib.sha256(password.encode()).hexdigest()


def _user_line(role: Role, deployment: str, password_hash: str) -> str:
    keys = [f"~{deployment_key(deployment, pattern)}" for pattern in role.own] + [
        f"~{pattern}" for pattern in role.keys
    ]
    channels = [f"&{deployment_key(deployment, pattern)}" for pattern in role.own_channels] + [
        f"&{pattern}" for pattern in role.channels
    ]
    return " ".join(
        [
            "user",
            role.name,
            "on",
            f"#{password_hash}",
            "resetkeys",
            *keys,
            "resetchannels",
            *channels,
            "-@all",
            role.commands,
        ]
    )
