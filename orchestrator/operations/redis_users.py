"""Redis users, one a role, as the lines of an ACL file: what each part of a deployment may touch, and nothing else.

Written for Redis 6.2, whose rules cannot tell reading a key from writing it, nor listening on a channel from publishing
there. What that leaves open, and how each role's rules were found: docs/security.md.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from contract.errors import ConfigError
from contract.names import HUB_SHARDS, deployment_key, result_channel_pattern

# What looks around beyond a user's own keys, or changes the server; `@dangerous` has KEYS, the FLUSHes, CONFIG, DEBUG,
# SHUTDOWN and the like.
_NEVER = "-@dangerous -@admin -scan -randomkey -dbsize -swapdb -move -copy -client -script -pubsub"
_BASE = "+@connection +@read +@write +@transaction +@pubsub +eval +evalsha +time +select"
_SPARED = (
    "+client|setname +client|setinfo +client|getname +client|id +client|maint_notifications +script|load +script|exists"
)
_PIDBOX = "/0.celery.pidbox"
_EVENTS_OF_WORKERS = ("/0.celeryev/*", "/0.celeryev/worker.*", "/0.celeryev/task.*")


@dataclass(frozen=True)
class Role:
    """One user. `own` and `own_channels`: of the deployment, behind its prefix; `keys` and `channels`: the others.
    `purpose`: who it is for.
    """

    name: str
    purpose: str
    own: tuple[str, ...]
    keys: tuple[str, ...]
    channels: tuple[str, ...]
    commands: str
    own_channels: tuple[str, ...] = ()


def _of_queues(pattern: str) -> tuple[str, ...]:
    """What tells of a worker that serves such queues: its report, its end, its slots."""
    return (f"host:{pattern}", f"tombstone:{pattern}", f"slots:{pattern}")


# Of every worker: that it lives, what became of its calls, and what is told it of tenants and switches.
_WORKERS_OWN = ("hosts", "refusals", "tenants", "switches", "listener:*", "t:*:call.*")
# Of workers beside a sandboxd: where sessions are, what their tools remember, and what is installed for tenants.
_SANDBOXES_OWN = (
    "catalog:sandbox*",
    "t:*:session.*:place",
    "t:*:session.*:state",
    "t:*:places",
    "t:*:skills",
    "t:*:skill-bundle.*",
    "t:*:blob-sandbox.*",
)
# Of Celery: bindings, what is taken and not yet acknowledged, answers to inspections, stored results.
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
            # It reports lost calls to Flower, in place of the worker that died.
            (*(result_channel_pattern(shard) for shard in HUB_SHARDS), "/0.celeryev/task.failed"),
            # How full Redis is: operators watch it (docs/metrics.md).
            f"{_PLAIN} +info",
            own_channels=("admission:*",),
        ),
        Role(
            "worker",
            "workers beside a sandboxd",
            (*_WORKERS_OWN, *_of_queues("host.*"), *_SANDBOXES_OWN, "metrics", "metrics:counted.*"),
            ("host.*", *_WORKERS_KEYS),
            _WORKERS_CHANNELS,
            _PLAIN,
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
                "t:*:web.*",
                "t:*:blob-web.*",
            ),
            ("pool.*", *_WORKERS_KEYS),
            _WORKERS_CHANNELS,
            # How full Redis is: pages are kept only where there is room.
            f"{_PLAIN} +info",
        ),
        Role(
            "flower",
            "Flower: events, and what workers answer; no queue, no result, no key of ours",
            (),
            ("_kombu.binding*", "*.reply.celery.pidbox*", "celeryev.*", "flower.*"),
            (_PIDBOX, *_EVENTS_OF_WORKERS),
            _PLAIN,
        ),
        Role("admin", "the operator, by hand: everything", ("*",), ("*",), ("*",), "+@all"),
    )
}


def build_users(deployment: str, hashes: Mapping[str, str]) -> str:
    """The lines of an ACL file. `hashes`: role -> SHA-256 of its password in hex. The default user is off.

    Raises ConfigError for a role that there is not.
    """
    unknown = sorted(hashes.keys() - ROLES.keys())
    if unknown:
        raise ConfigError(f"there is no role '{unknown[0]}': the roles are {', '.join(ROLES)}")
    lines = ["user default off resetpass resetkeys resetchannels -@all"]
    lines += [_user_line(ROLES[name], deployment, found) for name, found in hashes.items()]
    return "".join(f"{line}\n" for line in lines)


def hash_password(password: str) -> str:
    """As Redis keeps it. Passwords are random and long, so a quick hash does."""
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
