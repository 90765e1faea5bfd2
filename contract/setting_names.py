"""Names of all environment variables of toolcrew, so that every process reports a misspelled variable as an error."""

import difflib
import re
from collections.abc import Iterable

from toolcrew.contract.errors import ConfigError
from toolcrew.contract.setting_rows import PREFIX

MAX_SHOWN = 5

# Read by the settings class of some process. No process can import the classes of all others, so
# tests/unit/test_setting_names.py compares this list with them.
_SETTINGS = """
API_KEY
API_RATE
APPROVALS
APPROVAL_POLICY
APPROVAL_WAIT_S
APPROVERS
BRAVE_API_KEY
CHECKPOINT_EVERY_S
CONCURRENCY
DEPLOYMENT
DIALECT
DRAIN_S
EGRESS_ALLOW_UIDS
EGRESS_SOCKET
EGRESS_UIDS
EXA_API_KEY
FLOWER_URL
HOST
HOST_FREE_BYTES
IDLE_EVICT_S
IDLE_PAUSE_S
IMAGE_CACHE_BYTES
LOG_LEVEL
MAX_SANDBOXES
MAX_SESSIONS
MCP_REFRESH_S
MCP_SERVERS
MODEL
MODEL_CONTEXT_TOKENS
MODEL_FILE
MODEL_RETRIES
MODEL_STREAMING
MODEL_TIMEOUT_S
NAT64_PREFIX
PAGE_URL
POOL_SIZE
QUEUE_WAIT_S
REDIS_SENTINEL_MASTER
REDIS_SENTINEL_PASSWORD
REDIS_URL
REFUSE_RANGES
SANDBOXD_ALLOW_UIDS
SANDBOXD_LEASES
SANDBOXD_NAME
SANDBOXD_SOCKET
SANDBOXD_STATE
SANDBOX_IMAGE
SANDBOX_IMAGES_ALLOWED
SANDBOX_MEMORY_RESERVE_BYTES
SANDBOX_RUNTIME
SANDBOX_START
SANDBOX_WORKSPACE
SANDBOX_WORKSPACE_BYTES
SEARXNG_URL
SECRET
SECRETS_PREVIOUS
SKILLS
TAVILY_API_KEY
TENANT_CLASSES
TOOL_CONFIG
TOOL_MODULES
TRACES
TRACE_URL
TRACING
WEBFETCH_ALLOW_HOSTS
WEBFETCH_ONLY_HOSTS
WEBFETCH_PER_MINUTE
WORKER_KIND
WORKER_QUEUES
WORKSPACE_STORE
"""
# Read by docker-compose.yml and the deployment files, by scripts, and by tests.
_OTHERS = """
API_BIND
API_PORT
CHAOS_SEED
DOCKERD_ARGS
ENGINE_SOCKET
FLOWER_BIND
FLOWER_PASSWORD
FLOWER_PORT
FLOWER_USER
GUEST_PYTHON
HEALTH_INTERVAL
PYTHON
REDIS_ADMIN_PASSWORD
REDIS_FLOWER_PASSWORD
REDIS_ORCHESTRATOR_PASSWORD
REDIS_WEB_PASSWORD
REDIS_WORKER_PASSWORD
SERVICE_BASE
TEST_MARK
TEST_REQUIRE
WEB_CONCURRENCY
WEB_MEMORY
WORKER_MEMORY
"""
SETTINGS, OTHERS = frozenset(_SETTINGS.split()), frozenset(_OTHERS.split())
# Kubernetes sets these for every service of the namespace, also for one that is called toolcrew-...
_SERVICE_LINK = re.compile(r".+_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)")


def check_names(environment: Iterable[str]) -> None:
    """Raise ConfigError for variables that begin with TOOLCREW_ but that nothing reads. The message suggests the
    nearest valid names.
    """
    valid = SETTINGS | OTHERS
    names = (name.upper().removeprefix(PREFIX) for name in environment if name.upper().startswith(PREFIX))
    unknown = sorted(name for name in names if name not in valid and not _SERVICE_LINK.fullmatch(name))
    if unknown:
        descriptions = "; ".join(_describe(name, valid) for name in unknown[:MAX_SHOWN])
        more = f"; and {len(unknown) - MAX_SHOWN} more" if len(unknown) > MAX_SHOWN else ""
        raise ConfigError(
            f"{descriptions}{more}. Correct the name or unset the variable (docs/settings.md lists all of them)"
        )


def _describe(name: str, valid: Iterable[str]) -> str:
    close = difflib.get_close_matches(name[:100], sorted(valid), n=1, cutoff=0.6)
    return f"{PREFIX}{name[:100]} is not a setting" + (f" (did you mean {PREFIX}{close[0]}?)" if close else "")
