"""Hosts without a Docker engine: sandboxd takes images from a real containerd, as on a node of Kubernetes. The Docker
engine of the tests only pushes images to the registry.
"""

import asyncio
import json
import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path

import pytest
from docker import APIClient

from tests.chaos.forks import close_all
from tests.support.sandboxd.containerd_server import ContainerdServer, open_containerd
from tests.support.sandboxd.containers import IMAGE
from tests.support.sandboxd.image_registry import PASSWORD, USER, ImageRegistry, open_registry
from tests.support.stack.daemons import Daemon, Daemons, bash, run_script
from tests.support.stack.stack import ROOT, UP_S
from tests.support.stack.waiting import SOON_S, wait_until
from toolcrew.contract.errors import ErrorCode, SandboxUnavailable, ToolFailure
from toolcrew.contract.session_spec import SessionSpec
from toolcrew.contract.settings import SandboxdSettings
from toolcrew.contract.tenancy import SandboxPolicy
from toolcrew.workers.sandboxd.runtime import engines
from toolcrew.workers.sandboxd.runtime.engine import Engine

pytestmark = [pytest.mark.stack, pytest.mark.usefixtures("needs_root")]

MIB = 1024 * 1024
READ = 'echo "$(</mark)"'
NO_DOCKER = {"docker_host": "unix:///nonexistent/docker.sock"}
CLASSES = {"ci": {"user": "root"}}


@pytest.fixture(scope="module")
def server(engine: APIClient) -> Iterator[ContainerdServer]:
    with open_containerd(engine) as opened:
        yield opened
        assert opened.leases() == opened.views() == []


@pytest.fixture
def registry(engine: APIClient, tmp_path: Path) -> Iterator[ImageRegistry]:
    with open_registry(engine, tmp_path) as opened:
        yield opened


def start(daemons: Daemons, server: ContainerdServer, registry: ImageRegistry | None = None, **settings: str) -> Daemon:
    """Start a sandboxd on containerd, which pulls all images of the registry."""
    allowed = [f"{registry.repository}/*"] if registry is not None else []
    base = {"sandbox_images_allowed": json.dumps(allowed), "pool_size": "0", "sandbox_workspace": "image"}
    return daemons.start(**{**NO_DOCKER, "containerd_socket": server.address, **base, **settings})


def end(daemon: Daemon, server: ContainerdServer) -> None:
    """Stop a daemon. Nothing of it may be left in containerd, or in the folder of volumes."""
    assert daemon.stop(for_good=True) == 0
    assert server.leases() == server.views() == list((daemon.state / "volumes").iterdir()) == []


def test_an_image_is_pulled_once_and_its_layers_are_protected_while_a_session_runs(
    daemons: Daemons, server: ContainerdServer, registry: ImageRegistry
) -> None:
    image = registry.push("tool:v1", {"mark": b"one\n", "etc/passwd": b"eve:x:5:5::/:/bin/sh\n"})
    daemon = start(daemons, server, registry)
    with daemon.client() as client:
        assert client.describe_open("acme:s1", SessionSpec(image=image))["image"] == image
        assert run_script(client, "acme:s1", READ + "; echo ~sandbox ~eve").split() == ["one", "/home/sandbox", "/"]
        client.open("acme", "s2", SessionSpec(image=image))
        assert registry.count_pulls(image) == 1
        wait_until(lambda: image in daemon.status()["images_present"], SOON_S, "the host reports the image")
        server.remove(image)
        assert run_script(client, "acme:s1", READ) == "one\n"
        answer = bash(client, client.open("acme", "s3", SessionSpec(image=image)), READ)
        assert answer.streams["merged"] == b"one\n"
    assert daemon.status()["start"] == "oci"
    assert daemon.status()["engine"].startswith("containerd ")
    end(daemon, server)


def test_only_the_class_with_a_login_gets_a_private_image(
    engine: APIClient, daemons: Daemons, server: ContainerdServer, tmp_path: Path
) -> None:
    with open_registry(engine, tmp_path, needs_login=True) as registry:
        image = registry.push("tool:v1", {"mark": b"one\n"})
        password, wrong = tmp_path / "password", tmp_path / "wrong"
        password.write_text(f"{PASSWORD}\n")
        wrong.write_text("another-password")
        classes = {
            name: {"registries": {registry.address: {"user": USER, "password_file": str(path)}}}
            for name, path in (("builders", password), ("strangers", wrong))
        }
        daemon = start(daemons, server, registry, tenant_classes=json.dumps(classes))
        refusals = []
        with daemon.client() as client:
            for step in ("before the pull", "after the pull"):
                for tenant_class in ("default", "strangers"):
                    policy = SandboxPolicy(tenant_class=tenant_class)
                    with pytest.raises(ToolFailure, match=r"refuses access .* 'registries' of the tenant") as refused:
                        client.open("acme", "s", SessionSpec(image=image), policy=policy)
                    refusals.append(f"{step}: {refused.value}")
                policy = SandboxPolicy(tenant_class="builders")
                name = client.open("acme", "s", SessionSpec(image=image), policy=policy)
                assert run_script(client, name, READ) == "one\n"
                client.close(name)
        shown = "".join([*refusals, daemon.log(), json.dumps(daemon.status())])
        assert PASSWORD not in shown
        assert "another-password" not in shown
        end(daemon, server)


def test_an_image_that_does_not_exist_is_refused_with_what_to_do(
    daemons: Daemons, server: ContainerdServer, registry: ImageRegistry
) -> None:
    registry.push("tool:v1", {"mark": b"one\n"})
    daemon = start(daemons, server, registry)
    with daemon.client() as client:
        for name in ("tool:v2", "nothing:v1"):
            with pytest.raises(ToolFailure, match=r"has no such image \(.*\); check the name") as refused:
                client.open("acme", "s", SessionSpec(image=f"{registry.repository}/{name}"))
            assert refused.value.code is ErrorCode.INVALID_ARGUMENTS
    assert daemon.status()["image_cache"]["bytes"] == 0
    end(daemon, server)


def test_a_pull_from_a_silent_registry_ends_with_sandboxd(daemons: Daemons, server: ContainerdServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        daemon = start(daemons, server, sandbox_images_allowed=json.dumps([f"{address}/*"]))
        opening = start_open(daemon, f"{address}/tool:v1")
        connection, _ = silent.accept()
        with connection:
            assert connection.recv(4)  # containerd has asked, and waits for the answer
            end(daemon, server)
            while connection.recv(4096):
                pass  # containerd has closed the connection
        assert isinstance(opening.exception(SOON_S), SandboxUnavailable)


def start_open(daemon: Daemon, image: str) -> "Future[str]":
    """Open a session in the background."""
    opened: Future[str] = Future()

    def run() -> None:
        try:
            with daemon.client() as client:
                opened.set_result(client.open("acme", "s", SessionSpec(image=image)))
        except SandboxUnavailable as error:
            opened.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return opened


def test_an_image_that_declares_volumes_is_refused(
    engine: APIClient, daemons: Daemons, server: ContainerdServer, registry: ImageRegistry
) -> None:
    image = registry.push("tool:v1", {"mark": b"one\n"}, changes=["VOLUME /data"])
    daemon = start(daemons, server, registry)
    with daemon.client() as client, pytest.raises(SandboxUnavailable, match=r"it declares volumes \(/data\)"):
        client.open("acme", "s", SessionSpec(image=image))
    end(daemon, server)


def test_the_least_recently_used_images_are_removed_and_images_in_use_stay(
    daemons: Daemons, server: ContainerdServer, registry: ImageRegistry
) -> None:
    images = [registry.push(f"tool-{at}:v1", {"mark": secrets.token_bytes(4 * MIB)}) for at in range(4)]
    # containerd keeps each layer as it was downloaded and unpacked.
    daemon = start(daemons, server, registry, image_cache_bytes=str(18 * MIB))
    with daemon.client() as client:
        client.open("acme", "s0", SessionSpec(image=images[0]))
        for at in (1, 2):
            client.close(client.open("acme", f"s{at}", SessionSpec(image=images[at])))
        wait_until(lambda: not server.has(images[1]), SOON_S, "the oldest unused image is removed")
        assert server.has(images[0])
        named = f"docker.io/library/own-{secrets.token_hex(4)}:v1"
        server.tag(images[2], named)
        client.close(client.open("acme", "s3", SessionSpec(image=images[3])))
        wait_until(lambda: "pulled_image_left" in daemon.log(), SOON_S, "an image of the operator is kept")
        assert run_script(client, "acme:s0", "[ -s /mark ] && echo there") == "there\n"
    assert server.has(images[0])
    assert server.has(named)
    assert daemon.status()["image_cache"]["bytes"] <= 18 * MIB
    server.remove(named)
    end(daemon, server)


def test_a_killed_sandboxd_leaves_nothing_after_the_next_start(
    daemons: Daemons, server: ContainerdServer, registry: ImageRegistry
) -> None:
    image = registry.push("tool:v1", {"mark": b"one\n"})
    daemon = start(daemons, server, registry)
    with daemon.client() as client:
        name = client.open("acme", "s1", SessionSpec(image=image))
        run_script(client, name, "echo kept > file")
    before, volumes = server.leases(), list((daemon.state / "volumes").iterdir())
    daemon.kill()
    assert before
    assert server.leases() == before
    daemon.start()
    assert not set(before) & set(server.leases())
    assert len(list((daemon.state / "volumes").iterdir())) == 1
    assert not volumes[0].exists()
    with daemon.client() as client:
        assert run_script(client, name, 'echo "$(<file)"; ' + READ) == "kept\none\n"
    assert registry.count_pulls(image) == 1
    end(daemon, server)


def test_root_inside_forks_and_checkpoints_work(daemons: Daemons, server: ContainerdServer) -> None:
    daemon = start(daemons, server, tenant_classes=json.dumps(CLASSES))
    policy = SandboxPolicy(tenant_class="ci")
    change = "useradd --uid 4321 eve; rm /etc/issue; echo new > /etc/motd; chown eve /etc/motd; export COLOUR=blue"
    look = "stat -c '%U' /etc/motd; cat /etc/motd; ls /etc/issue 2>/dev/null; echo $COLOUR; cat file"
    with daemon.client() as client:
        name = client.open("acme", "s1", SessionSpec(), policy=policy)
        assert run_script(client, name, f"{change}; echo work > file; id -u") == "0\n"
        client.fork(name, ["acme:child"])
        run_script(client, name, "echo parent > file; echo parent > /etc/motd")
        assert run_script(client, "acme:child", look).split() == ["eve", "new", "blue", "work"]
        checkpoint = client.checkpoint("acme:child")["checkpoint"]
        restored = client.open("acme", "s2", SessionSpec(restore=checkpoint), policy=policy)
        assert run_script(client, restored, look).split() == ["eve", "new", "blue", "work"]
    close_all(daemon)
    end(daemon, server)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"TOOLCREW_TENANT_CLASSES": '{"far": {"runtime": "runsc"}}'}, "the runtime 'runsc' of a tenant class needs"),
        ({"TOOLCREW_SANDBOX_START": "engine"}, "TOOLCREW_SANDBOX_START=engine needs a Docker engine"),
        ({"TOOLCREW_SANDBOX_IMAGE": "nothing:v1"}, "the engine has no image nothing:v1"),
        ({"TOOLCREW_CONTAINERD_SOCKET": "/nonexistent.sock"}, "containerd at /nonexistent.sock refused"),
    ],
)
def test_the_check_names_what_containerd_cannot_do(
    server: ContainerdServer, tmp_path: Path, settings: dict[str, str], reason: str
) -> None:
    report = check(server, tmp_path, settings)
    assert reason in report["problem"]
    [row] = [row for row in report["guarantees"] if row["name"] == "profile holds"]
    assert row["state"] == "broken"


def test_the_check_says_that_containerd_is_used(server: ContainerdServer, tmp_path: Path) -> None:
    # In a pod, the folder of the state is a mount.
    (tmp_path / "state").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "state", tmp_path / "state"], check=True)
    try:
        report = check(server, tmp_path, {})
    finally:
        subprocess.run(["umount", tmp_path / "state"], check=True)
    assert "problem" not in report
    assert report["engine"].startswith("containerd ")
    states = {row["name"]: row["state"] for row in report["guarantees"]}
    assert states["sandboxes start without the engine"] == states["images are present"] == "holds"
    assert server.leases() == server.views() == []


def check(server: ContainerdServer, folder: Path, settings: dict[str, str]) -> dict[str, object]:
    """Return the report of `--check`."""
    own = {
        "TOOLCREW_CONTAINERD_SOCKET": server.address,
        "TOOLCREW_SANDBOXD_STATE": str(folder / "state"),
        "TOOLCREW_SANDBOXD_LEASES": str(folder / "leases"),
        "DOCKER_HOST": NO_DOCKER["docker_host"],
    }
    argv = [sys.executable, "-m", "toolcrew.workers.sandboxd", "--check", "--json"]
    environment = {**os.environ, **own, **settings}
    done = subprocess.run(argv, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=UP_S, check=False)
    assert done.stdout, done.stderr
    report: dict[str, object] = json.loads(done.stdout)
    return report


CHOOSE = """
import asyncio
from toolcrew.contract.settings import SandboxdSettings, read_environment
from toolcrew.workers.sandboxd.runtime.engines import open_engine
print(type(asyncio.run(open_engine(read_environment(SandboxdSettings)))).__name__)
"""
NODE = 'mount -t tmpfs node /run && mkdir /run/containerd && {link} && exec python -c "$CHOOSE"'
LINK = "ln -s {address} /run/containerd/containerd.sock"


@pytest.mark.parametrize(
    ("environment", "link", "chosen"),
    [({}, LINK, "ContainerdEngine"), (NO_DOCKER, LINK, "Engine"), ({}, "true", "Engine")],
    ids=["a node", "DOCKER_HOST is set", "no containerd"],
)
def test_containerd_is_used_only_where_no_docker_engine_answers(
    server: ContainerdServer, environment: dict[str, str], link: str, chosen: str
) -> None:
    script = NODE.format(link=link.format(address=server.address))
    plain = {name: value for name, value in os.environ.items() if name != "DOCKER_HOST"}
    settings = {name.upper(): value for name, value in environment.items()}
    own = {"CHOOSE": CHOOSE, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    # Below /run of the mount namespace, only containerd has a socket.
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script],
        env={**plain, **own, **settings},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=UP_S,
        check=False,
    )
    assert done.stdout.splitlines()[-1:] == [chosen], done.stderr


def test_a_docker_engine_that_answers_is_used(monkeypatch: pytest.MonkeyPatch, server: ContainerdServer) -> None:
    monkeypatch.setattr(engines, "DEFAULT_ADDRESS", server.address)
    with closing(asyncio.run(engines.open_engine(SandboxdSettings()))) as chosen:
        assert type(chosen) is Engine


def test_the_sandbox_image_is_that_of_the_docker_engine(server: ContainerdServer, engine: APIClient) -> None:
    """The content id of an image is the same in both, so a session finds its image on both kinds of hosts."""
    reply = server.client.call("runtime.v1.ImageService/ImageStatus", {"image": {"image": IMAGE}})
    assert reply.image.id == engine.inspect_image(IMAGE)["Id"]
