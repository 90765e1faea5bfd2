"""Deployment files pass every documented setting on, or this file lists the setting with the reason for the omission."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from toolcrew.contract.settings import (
    EgressSettings,
    OrchestratorSettings,
    SandboxdSettings,
    StreamGatewaySettings,
    TracingSettings,
    WebSettings,
    WorkerSettings,
    variable_names,
)

ROOT = Path(__file__).resolve().parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))["services"]
PROCESSES: dict[str, tuple[type[BaseModel], ...]] = {
    "orchestrator": (OrchestratorSettings, TracingSettings),
    "api": (OrchestratorSettings, TracingSettings),
    "worker": (WorkerSettings, TracingSettings),
    "web-worker": (WorkerSettings, WebSettings, TracingSettings),
    "sandboxd": (SandboxdSettings,),
    "egress": (EgressSettings,),
    "stream-gateway": (StreamGatewaySettings,),
}
"""Service of compose and container of Kubernetes -> the settings that its process reads."""

_EMBEDDED = "read by an embedded stack only"
_OWN_REDIS = (
    "for a Redis outside of these files; an overlay sets it together with the mounted certificates (docs/deploy.md)"
)
ABSENT: dict[tuple[str, str], str] = {
    ("*", "TOOLCREW_REDIS_SENTINEL_MASTER"): _OWN_REDIS,
    ("*", "TOOLCREW_REDIS_SENTINEL_PASSWORD"): _OWN_REDIS,
    (
        "orchestrator",
        "TOOLCREW_API_KEY",
    ): "the key of one person, given to one command: docker-compose exec -e TOOLCREW_API_KEY",
    ("orchestrator", "TOOLCREW_URL"): "programs of tenants read it",
    ("api", "TOOLCREW_URL"): "programs of tenants read it",
    ("api", "TOOLCREW_API_KEY"): "the API takes the key of each request",
    ("*", "TOOLCREW_MODEL_FILE"): "the images have no local model",
    ("orchestrator", "TOOLCREW_TENANT_CLASSES"): _EMBEDDED,
    ("api", "TOOLCREW_TENANT_CLASSES"): _EMBEDDED,
    ("orchestrator", "TOOLCREW_EGRESS_SOCKET"): _EMBEDDED,
    ("api", "TOOLCREW_EGRESS_SOCKET"): _EMBEDDED,
    ("orchestrator", "TOOLCREW_API_RATE"): "a limit of the API",
    ("worker", "TOOLCREW_WORKER_KIND"): "sandbox is the default",
    ("worker", "TOOLCREW_WORKER_QUEUES"): "a setting of web workers",
    ("worker", "TOOLCREW_TOOL_MODULES"): "operators' tools run in the web worker",
    ("worker", "TOOLCREW_TOOL_CONFIG"): "operators' tools run in the web worker",
    ("web-worker", "TOOLCREW_SANDBOXD_SOCKET"): "it has no sandboxes",
    ("web-worker", "TOOLCREW_CHECKPOINT_EVERY_S"): "it has no sandboxes",
    ("web-worker", "TOOLCREW_DRAIN_S"): "it has no sessions to move",
    ("web-worker", "TOOLCREW_SKILLS"): "skills run in sandboxes",
    ("sandboxd", "TOOLCREW_CONTAINERD_SOCKET"): "compose needs a Docker engine",
    ("sandboxd", "TOOLCREW_SANDBOXD_STATE"): "compose mounts the default folder as a volume",
    ("sandboxd", "TOOLCREW_SANDBOXD_LEASES"): "one sandboxd runs per engine",
}
"""(service or `*`, variable) -> why docker-compose.yml does not pass it on."""


def read_variables(service: str) -> list[tuple[str, ...]]:
    """Return the settings of a service, each with the variables that set it."""
    return [
        variable_names(name, field) for settings in PROCESSES[service] for name, field in settings.model_fields.items()
    ]


def read_kubernetes() -> dict[str, dict[str, Any]]:
    """Return the manifest of each container."""
    containers: dict[str, dict[str, Any]] = {}
    for path in (ROOT / "deploy" / "kubernetes").glob("*.yaml"):
        for document in yaml.safe_load_all(path.read_text(encoding="utf-8")):
            pod = document.get("spec", {}).get("template", {}).get("spec", {})
            containers |= {
                container["name"]: container
                for container in [*pod.get("initContainers", []), *pod.get("containers", [])]
            }
    return containers


KUBERNETES = read_kubernetes()


@pytest.mark.parametrize("service", PROCESSES)
def test_compose_passes_every_setting_or_lists_it_as_absent(service: str) -> None:
    environment = COMPOSE[service]["environment"]
    missing = [
        names[0]
        for names in read_variables(service)
        if not set(names) & set(environment)
        and not any((where, name) in ABSENT for where in (service, "*") for name in names)
    ]
    assert not missing, f"docker-compose.yml, {service}: pass {missing} on, or list them in ABSENT with the reason"


def test_no_absent_setting_is_passed_by_compose() -> None:
    for where, name in ABSENT:
        services = PROCESSES if where == "*" else (where,)
        assert not [service for service in services if name in COMPOSE[service]["environment"]], name
        assert any(name in names for service in services for names in read_variables(service)), (
            f"{name} is no setting of {where}"
        )


@pytest.mark.parametrize("service", PROCESSES)
def test_kubernetes_passes_every_setting_from_one_config_map(service: str) -> None:
    """A variable in `env` hides that of the map, so only names, addresses, secrets and sizes of this container belong
    there.
    """
    assert {"configMapRef": {"name": "settings", "optional": True}} in KUBERNETES[service]["envFrom"]
    container_variables = {
        variable["name"] for variable in KUBERNETES[service].get("env", []) if variable["name"].startswith("TOOLCREW_")
    }
    assert container_variables <= {
        "TOOLCREW_DEPLOYMENT",
        "TOOLCREW_SECRET",
        "TOOLCREW_REDIS_URL",
        "TOOLCREW_REDIS_STREAMS_PASSWORD",
        "TOOLCREW_STREAM_ADDRESS",
        "TOOLCREW_STREAM_PORT",
        "TOOLCREW_REDIS_ORCHESTRATOR_PASSWORD",
        "TOOLCREW_REDIS_WORKER_PASSWORD",
        "TOOLCREW_REDIS_WEB_PASSWORD",
        "TOOLCREW_CONTAINERD_SOCKET",
        "TOOLCREW_CONCURRENCY",
        "TOOLCREW_DRAIN_S",
        "TOOLCREW_MCP_SERVERS",
        "TOOLCREW_WORKER_KIND",
        "TOOLCREW_SANDBOXD_SOCKET",
        "TOOLCREW_SANDBOXD_ALLOW_UIDS",
        "TOOLCREW_SANDBOXD_GATEWAY_UIDS",
        "TOOLCREW_SANDBOXD_NAME",
        "TOOLCREW_SANDBOXD_STATE",
        "TOOLCREW_SANDBOXD_LEASES",
        "TOOLCREW_EGRESS_SOCKET",
        "TOOLCREW_EGRESS_ALLOW_UIDS",
        "TOOLCREW_EGRESS_UIDS",
    }
