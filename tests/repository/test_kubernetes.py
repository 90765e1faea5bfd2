"""deploy/kubernetes is valid, agrees with docker-compose.yml, and keeps the isolation: access to the engine, to
networks, and to secrets.
"""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from kubernetes_validate import validate

from toolcrew.contract.names import POOL_QUEUES
from toolcrew.contract.settings import (
    DEFAULT_IMAGE,
    EgressSettings,
    OrchestratorSettings,
    SandboxdSettings,
    StreamGatewaySettings,
    WebSettings,
    WorkerSettings,
)
from toolcrew.store.pressure import HostsPressure, QueuePressure
from toolcrew.workers.sandboxd.runtime.cgroup_namespace import HOST_NAMESPACE
from toolcrew.workers.sandboxd.runtime.containerd import DEFAULT_ADDRESS

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
VERSIONS = ("1.29", "1.35")
"""The oldest that has sidecars, and a late one."""
SCHEMAS: dict[str, Any] = json.loads((Path(__file__).parent / "kubernetes_schemas.json").read_text(encoding="utf-8"))
"""Schemas of custom resources, with the fields that we use, as KEDA and kustomize document them. Unknown fields are
errors.
"""
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
SERVICES = {"redis", "sandboxd", "egress", "worker", "stream-gateway", "web-worker", "orchestrator", "flower"}
"""Containers that are services of docker-compose.yml, too."""
CONTAINERD = "/run/containerd"
SETTINGS = (OrchestratorSettings, WorkerSettings, SandboxdSettings, WebSettings, EgressSettings, StreamGatewaySettings)
SECRET = re.compile(r"SECRET|PASSWORD|API_KEY")


def load_documents() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in sorted(FOLDER.rglob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text(encoding="utf-8")):
            yield (
                f"{path.relative_to(FOLDER)}:{document['kind']}:{document.get('metadata', {}).get('name', '')}",
                document,
            )


DOCUMENTS = dict(load_documents())
KUSTOMIZATIONS = {name: document for name, document in DOCUMENTS.items() if document["kind"] == "Kustomization"}
WORKLOADS = {
    document["metadata"]["name"]: document for document in DOCUMENTS.values() if "template" in document.get("spec", {})
}


def pod_of(workload: str) -> dict[str, Any]:
    spec: dict[str, Any] = WORKLOADS[workload]["spec"]["template"]["spec"]
    return spec


def containers() -> dict[str, tuple[str, dict[str, Any]]]:
    """Return each container with its workload. A duplicate name would hide a container."""
    containers_by_name: dict[str, tuple[str, dict[str, Any]]] = {}
    for workload in WORKLOADS:
        for container in [*pod_of(workload).get("initContainers", []), *pod_of(workload)["containers"]]:
            assert container["name"] not in containers_by_name
            containers_by_name[container["name"]] = workload, container
    return containers_by_name


CONTAINERS = containers()


def environment_of(name: str) -> dict[str, str | None]:
    """Return the value of each variable, or None for a value from another source."""
    return {variable["name"]: variable.get("value") for variable in CONTAINERS[name][1].get("env", [])}


def user_of(name: str) -> tuple[int, int]:
    workload, container = CONTAINERS[name]
    context = {**pod_of(workload)["securityContext"], **container["securityContext"]}
    return context["runAsUser"], context["runAsGroup"]


def bytes_of(text: str) -> int:
    number, unit = re.fullmatch(r"(\d+)(\w*)", text).groups()  # type: ignore[union-attr]
    return int(number) * {"Mi": 2**20, "Gi": 2**30, "m": 2**20, "g": 2**30}[unit]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    "name", [name for name, document in DOCUMENTS.items() if document["apiVersion"] not in SCHEMAS]
)
def test_document_matches_the_schema_of_the_api_server(name: str, version: str) -> None:
    validate(DOCUMENTS[name], version, strict=True)


@pytest.mark.parametrize("name", [name for name, document in DOCUMENTS.items() if document["apiVersion"] in SCHEMAS])
def test_document_matches_the_schema_of_keda_or_kustomize(name: str) -> None:
    jsonschema.Draft202012Validator(SCHEMAS[DOCUMENTS[name]["apiVersion"]]).validate(DOCUMENTS[name])


def test_documents_have_no_duplicate_fields_or_anchors() -> None:
    """A duplicate field would be lost, and some readers of these files do not follow an anchor into another document."""
    for path in FOLDER.rglob("*.yaml"):
        text = path.read_text(encoding="utf-8")
        assert not any(getattr(event, "anchor", None) for event in yaml.parse(text, Loader=yaml.CSafeLoader)), path
        for node in yaml.compose_all(text, Loader=yaml.CSafeLoader):
            _check_keys(node)


def _check_keys(node: yaml.Node | None) -> None:
    if isinstance(node, yaml.MappingNode):
        keys = [key.value for key, _ in node.value]
        assert len(keys) == len(set(keys)), keys
        for _, value in node.value:
            _check_keys(value)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            _check_keys(value)


def test_kustomizations_list_exactly_the_files_of_their_folder() -> None:
    for name, kustomization in KUSTOMIZATIONS.items():
        folder = (FOLDER / name.split(":")[0]).parent
        assert set(kustomization["resources"]) == {path.name for path in folder.glob("*.yaml")} - {"kustomization.yaml"}
        for generated in kustomization.get("configMapGenerator", []):
            assert all((folder / file).is_file() for file in generated["files"])


def test_manifests_and_example_contain_no_secret_values() -> None:
    assert not [name for name, document in DOCUMENTS.items() if document["kind"] == "Secret"]
    example = (FOLDER / "secrets.env.example").read_text(encoding="utf-8")
    names = {line.removesuffix("=") for line in example.splitlines() if not line.startswith("#")}
    made = re.findall(
        r"^(TOOLCREW_\w+)=$", (ROOT / "deploy" / ".env.example").read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    assert names == set(made)
    for name, (_, container) in CONTAINERS.items():
        for variable in container.get("env", []):
            if SECRET.search(variable["name"]):
                assert variable["valueFrom"]["secretKeyRef"] == {"name": "toolcrew", "key": variable["name"]}, name
                assert variable["name"] in names
            elif "PASSWORD" in variable.get("value", ""):
                assert re.search(r"\$\(TOOLCREW_\w+_PASSWORD\)", variable["value"]), name


def test_git_ignores_secrets_env() -> None:
    text = subprocess.run(
        ["git", "-C", str(ROOT), "check-ignore", "-q", "deploy/kubernetes/secrets.env"], timeout=20, check=False
    )
    assert text.returncode == 0


@pytest.mark.parametrize("name", sorted(CONTAINERS))
def test_environment_variables_are_known_settings(name: str) -> None:
    fields = {f"TOOLCREW_{field.upper()}" for settings in SETTINGS for field in settings.model_fields}
    for variable in environment_of(name):
        is_password = re.fullmatch(r"TOOLCREW_(REDIS_[A-Z]+|FLOWER)_PASSWORD", variable)
        assert variable in fields or is_password or variable == "NODE_NAME" or variable.startswith("FLOWER_"), variable


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_service_has_the_same_environment_as_in_compose(name: str) -> None:
    environment, compose_environment = environment_of(name), COMPOSE["services"][name]["environment"]
    for variable in environment.keys() & compose_environment.keys():
        value, plain = environment[variable], re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", str(compose_environment[variable]))
        if variable == "TOOLCREW_REDIS_URL":
            assert str(value).split("@")[0].replace("$(", "${").replace(")", "") == plain.split("@")[0].split(":?")[
                0
            ].rstrip("}")
        elif value is not None and "$" not in f"{value}{plain}" and compose_environment[variable] is not None:
            assert value == plain, variable
    # A setting with a default in compose comes from the map of settings here.
    fixed = {
        variable
        for variable, value in compose_environment.items()
        if value is not None and not str(value).startswith(f"${{{variable}:-")
    }
    missing = fixed - environment.keys()
    # Empty unless a secret is being changed; the node's name in a script; this engine's only sandboxd; and no folder
    # that all pods share.
    assert missing <= {"TOOLCREW_SECRETS_PREVIOUS", "TOOLCREW_HOST", "TOOLCREW_TRACES"}


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_service_has_the_same_image_user_and_memory_as_in_compose(name: str) -> None:
    _, container = CONTAINERS[name]
    service = COMPOSE["services"][name]
    assert container["image"] == service["image"]
    stage = re.split(r"^FROM \S+ AS (\S+)$", DOCKERFILE, flags=re.MULTILINE)
    uid, gid = re.findall(r"^USER (\d+):(\d+)$", stage[stage.index(name) + 1], flags=re.MULTILINE)[0]
    assert user_of(name) == (int(uid), int(gid))
    memory = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", service["mem_limit"])
    assert bytes_of(container["resources"]["limits"]["memory"]) == bytes_of(memory)


@pytest.mark.parametrize("name", sorted(CONTAINERS))
def test_container_security_context_is_restricted(name: str) -> None:
    workload, container = CONTAINERS[name]
    context = container["securityContext"]
    assert context["readOnlyRootFilesystem"] is True
    assert pod_of(workload)["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    is_root = user_of(name)[0] == 0
    assert is_root == (name in ("sandboxd", "own-directory"))
    # Kubernetes gives loop devices only to a privileged container.
    assert context.get("privileged") == (True if name == "sandboxd" else None)
    if name != "sandboxd":
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"]["drop"] == ["ALL"]
        assert ("add" in context["capabilities"]) == (name == "own-directory")
    assert {"requests", "limits"} <= container["resources"].keys()


@pytest.mark.parametrize("workload", sorted(WORKLOADS))
def test_pod_has_no_service_account_token_or_host_namespaces(workload: str) -> None:
    pod = pod_of(workload)
    assert (pod["serviceAccountName"], pod["automountServiceAccountToken"]) == ("toolcrew", False)
    assert not {"hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace"} & pod.keys()
    assert WORKLOADS[workload]["spec"]["selector"]["matchLabels"] == {"app.kubernetes.io/name": workload}


def test_only_sandboxd_mounts_the_folder_of_containerd_s_socket() -> None:
    assert {name for name, (_, container) in CONTAINERS.items() if CONTAINERD in str(container)} == {"sandboxd"}
    assert "docker" not in str(WORKLOADS).lower()
    assert (
        environment_of("sandboxd")["TOOLCREW_CONTAINERD_SOCKET"] == DEFAULT_ADDRESS == f"{CONTAINERD}/containerd.sock"
    )
    image = environment_of("sandboxd").get("TOOLCREW_SANDBOX_IMAGE", DEFAULT_IMAGE)
    [first, *_] = pod_of("sandbox-host")["initContainers"]
    assert first["image"] == image, "the kubelet pulls the image of sandboxes before sandboxd starts"
    for name, (workload, container) in CONTAINERS.items():
        paths = {volume["name"] for volume in pod_of(workload).get("volumes", []) if "hostPath" in volume}
        used = {mount["name"] for mount in container.get("volumeMounts", [])} & paths
        assert not used or name in ("sandboxd", "egress", "own-directory") or (name, used) == ("worker", {"skills"})
    assert "TOOLCREW_REDIS_URL" not in environment_of("sandboxd")
    sandboxd = CONTAINERS["sandboxd"][1]
    assert sandboxd in pod_of("sandbox-host")["initContainers"], "it is there before the worker and after it"
    assert (sandboxd["restartPolicy"], "startupProbe" in sandboxd) == ("Always", True)
    _, worker = CONTAINERS["worker"]
    assert {"name": "skills", "mountPath": "/var/lib/toolcrew-skills", "readOnly": True} in worker["volumeMounts"]


def test_sandboxd_has_the_same_host_folders_as_in_compose() -> None:
    """The same paths on both sides: the engine names paths of the host."""
    folders = {
        volume.split(":")[0]: volume.split(":")[1:]
        for volume in COMPOSE["services"]["sandboxd"]["volumes"]
        if isinstance(volume, str) and volume.startswith("/")
    }
    paths = {volume["name"]: volume.get("hostPath", {}).get("path") for volume in pod_of("sandbox-host")["volumes"]}
    mounts = {
        paths[mount["name"]]: [mount["mountPath"], *(["ro"] if mount.get("readOnly") else [])]
        for mount in CONTAINERS["sandboxd"][1]["volumeMounts"]
    }
    del folders["/var/lib/docker"]
    assert {path: mounts.get(path) for path in folders} == folders
    assert set(folders) == {"/run/toolcrew/oci", "/sys/fs/cgroup", "/dev", CONTAINERD, "/var/lib/containerd"}
    others = {"/var/lib/toolcrew", "/run/toolcrew-egress", "/proc/1/ns/cgroup"}
    assert mounts.keys() - folders.keys() == {None, *others}
    assert mounts["/proc/1/ns/cgroup"] == [str(HOST_NAMESPACE), "ro"]


@pytest.mark.parametrize("workload", ["sandbox-host", "web-worker"])
def test_worker_drains_before_its_pod_terminates(workload: str) -> None:
    container = pod_of(workload)["containers"][0]
    assert 'toolcrew hosts drain "$TOOLCREW_HOST" --wait' in container["lifecycle"]["preStop"]["exec"]["command"][-1]
    drain_s = float(
        environment_of(container["name"]).get("TOOLCREW_DRAIN_S") or WorkerSettings.model_fields["drain_s"].default
    )
    assert pod_of(workload)["terminationGracePeriodSeconds"] >= drain_s + 60


@pytest.mark.parametrize(
    ("node", "host"),
    [
        ("ip-10-0-3-7.eu-west-1.compute.internal", "ip-10-0-3-7-[0-9a-f]{12}"),
        ("a" * 63 + ".example", "a{27}-[0-9a-f]{12}"),
        ("web-worker-5d8f7b9c6d-x2x7k", "web-worker-5d8f7b9c6d-x2x7k-[0-9a-f]{12}"),
    ],
)
def test_host_name_from_a_node_name_is_valid(node: str, host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["sh", str(FOLDER / "on-node"), "sh", "-c", 'printf %s "$TOOLCREW_HOST"']
    made = subprocess.run(
        command,
        env={"PATH": "/usr/bin:/bin", "NODE_NAME": node},
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    ).stdout
    assert re.fullmatch(host, made)
    monkeypatch.setenv("TOOLCREW_REDIS_URL", "redis://:p@r/0")
    monkeypatch.setenv("TOOLCREW_HOST", made)
    assert WorkerSettings().host == made


def test_autoscaler_metrics_exist_in_the_api_and_use_a_key() -> None:
    numbers = {f"hosts.{name}" for name in HostsPressure.model_fields}
    numbers |= {f"queues.{pool}.{name}" for pool in POOL_QUEUES for name in QueuePressure.model_fields}
    key = DOCUMENTS["keda/network.yaml:TriggerAuthentication:api-key"]
    assert key["spec"]["secretTargetRef"] == [{"parameter": "token", "name": "keda", "key": "token"}]
    scaled = [document for document in DOCUMENTS.values() if document["kind"] == "ScaledObject"]
    assert len(scaled) == 2
    for document in scaled:
        assert document["spec"]["scaleTargetRef"]["name"] in WORKLOADS
        assert "replicas" not in WORKLOADS[document["spec"]["scaleTargetRef"]["name"]]["spec"]
        for trigger in document["spec"]["triggers"]:
            assert trigger["metadata"]["url"] == "http://api.toolcrew.svc.cluster.local:8080/v1/pressure"
            assert (trigger["metadata"]["authMode"], trigger["authenticationRef"]) == ("bearer", {"name": "api-key"})
            assert trigger["metadata"]["valueLocation"] in numbers
    demand = next(
        trigger for document in scaled for trigger in document["spec"]["triggers"] if trigger["name"] == "demand"
    )
    assert demand["metadata"]["targetValue"] == environment_of("web-worker")["TOOLCREW_CONCURRENCY"]


def test_only_workers_get_the_mcp_server_file_and_its_secrets() -> None:
    compose_environments = {name: service.get("environment") or {} for name, service in COMPOSE["services"].items()}
    variables = {
        name: of["TOOLCREW_MCP_SERVERS"] for name, of in compose_environments.items() if "TOOLCREW_MCP_SERVERS" in of
    }
    assert variables == {"worker": None, "web-worker": None}
    for name, (workload, container) in containers().items():
        path_variables = [
            variable for variable in container.get("env", []) if variable["name"] == "TOOLCREW_MCP_SERVERS"
        ]
        mounts = [mount for mount in container.get("volumeMounts", []) if mount["name"] == "mcp"]
        secrets = [source["secretRef"] for source in container.get("envFrom", []) if "secretRef" in source]
        secrets = [secret for secret in secrets if secret["name"] == "mcp"]
        if name not in ("worker", "web-worker"):
            assert (path_variables, mounts, secrets) == ([], [], []), name
            continue
        assert path_variables[0]["valueFrom"] == {"configMapKeyRef": {"name": "mcp", "key": "path", "optional": True}}
        assert mounts == [{"name": "mcp", "mountPath": "/etc/toolcrew-mcp", "readOnly": True}]
        assert secrets == [{"name": "mcp", "optional": True}]
        assert {"name": "mcp", "configMap": {"name": "mcp", "optional": True}} in pod_of(workload)["volumes"]


def test_service_secrets_go_only_to_the_processes_that_use_them() -> None:
    secrets = {
        secret: {
            name
            for name, (_, container) in containers().items()
            if {"secretRef": {"name": secret, "optional": True}} in container.get("envFrom", [])
        }
        for secret in ("model", "web", "mcp")
    }
    assert secrets == {"model": {"orchestrator", "api"}, "web": {"web-worker"}, "mcp": {"worker", "web-worker"}}


def test_documented_mcp_configmap_has_the_path_that_workers_read() -> None:
    page = (ROOT / "docs" / "add-a-tool.md").read_text(encoding="utf-8")
    command = next(line for line in page.splitlines() if "create configmap mcp " in line)
    assert "--from-literal=path=/etc/toolcrew-mcp/servers.json --from-file=servers.json" in command
