"""The worker of a sandbox host. It serves a queue of its own, next to the host's sandboxd."""

import os
from functools import partial
from pathlib import Path

from toolcrew.contract.hosts import holder_name
from toolcrew.contract.settings import WorkerSettings, copy_environment
from toolcrew.contract.specs import Catalog
from toolcrew.store.clock import SharedClock
from toolcrew.store.connection import connect, connect_once
from toolcrew.store.secrets import WorkerSecrets
from toolcrew.store.tool_state import StateStore
from toolcrew.workers.call_event_writer import open_call_events
from toolcrew.workers.control import SandboxOrders
from toolcrew.workers.host import SandboxHost
from toolcrew.workers.mcp.server_registry import ServerRegistry
from toolcrew.workers.mcp.settings import StdioEntry, load_servers
from toolcrew.workers.sandbox_client import SandboxClient
from toolcrew.workers.skills.examiner import SkillExaminer
from toolcrew.workers.skills.installed import InstalledSkillCache
from toolcrew.workers.skills.loader import load_skills
from toolcrew.workers.skills.of_session import SessionSkills
from toolcrew.workers.skills.tool import build_skill_tool, register_skill_tools
from toolcrew.workers.tools.base import WorkerResources
from toolcrew.workers.tools.builtin import build_registry
from toolcrew.workers.worker import WorkerParts, run_worker


def _find_skill_roots(settings: WorkerSettings) -> tuple[Path, ...]:
    """Return the folders that contain skills."""
    if settings.skills is not None:
        return tuple(Path(root) for root in settings.skills.split(os.pathsep) if root)
    package = Path(__file__).parent
    # In an installed package the skills are inside the package. In a source checkout, where toolcrew/workers is a
    # link, they are next to the linked folder.
    folders = (package / "shipped_skills", package.resolve().parent / "skills")
    return tuple(folder for folder in folders if folder.is_dir())[:1]


def run_sandbox_worker(settings: WorkerSettings) -> None:
    """Serve calls until the process receives a stop signal. Raises OperatorError: the worker cannot start."""
    broker, deployment = settings.broker(), settings.deployment
    roots = _find_skill_roots(settings)
    registry, skills = build_registry(), load_skills(roots)
    if roots:
        installed = InstalledSkillCache(connect(broker), deployment, broker.signing_keys())
        registry.register(build_skill_tool(skills, installed, SessionSkills(SkillExaminer())))
        register_skill_tools(registry, skills)
    entries = load_servers(settings.mcp_servers, StdioEntry, copy_environment())
    servers = None
    if entries:
        # Import late: the MCP SDK costs 30 MiB and half a second at the start.
        from toolcrew.workers.mcp.sandbox_tools import AT_ONCE, await_sandboxd, build_sandbox_sources

        sources = build_sandbox_sources(entries, settings.sandboxd_socket)
        servers = ServerRegistry(registry, sources, settings.mcp_refresh_s, AT_ONCE)
        await_sandboxd(settings.sandboxd_socket)
        servers.list_due_servers()
    clock = SharedClock()
    host = SandboxHost(settings, clock)

    def open_resources() -> WorkerResources:
        return WorkerResources(
            {"host": settings.host, "queue": host.queue},
            holder_name(host.queue, host.worker),
            host.open_call_client(),
            StateStore.of(broker),
            partial(open_call_events, connect_once(broker), deployment, broker.signing_keys()),
            WorkerSecrets(connect(broker), deployment, broker.signing_keys()).all,
        )

    run_worker(
        settings,
        WorkerParts(
            kind="sandbox",
            host=host,
            clock=clock,
            registry=registry,
            servers=servers,
            build_catalogs=lambda: {
                "sandbox": Catalog(tools=tuple(registry.specs()), skills=tuple(skill.summary for skill in skills))
            },
            build_order_handler=lambda _, ledger: SandboxOrders(
                partial(SandboxClient, settings.sandboxd_socket), ledger
            ),
            open_resources=open_resources,
        ),
    )
