"""Images that sandboxd pulls from a real registry through the real engine."""

import contextlib
import json
import os
import secrets
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import docker.errors
import pytest
from docker import APIClient

from tests.support.sandboxd.image_registry import PASSWORD, USER, ImageRegistry, open_registry
from tests.support.stack.daemons import Daemon, Daemons, bash, open_daemons, run_script
from tests.support.stack.stack import Stack, open_stack
from tests.support.stack.waiting import SOON_S, wait_until
from toolcrew.contract.errors import ErrorCode, SandboxUnavailable, ToolFailure
from toolcrew.contract.session_spec import SessionSpec
from toolcrew.contract.tenancy import SandboxPolicy
from toolcrew.orchestrator.operations.ports import reserve_port
from toolcrew.orchestrator.sdk.client import ToolClient

pytestmark = pytest.mark.stack

MIB = 1024 * 1024
READ = 'echo "$(</mark)"'
"""Prints the file of an image, which has no programs."""


@pytest.fixture
def registry(engine: APIClient, tmp_path: Path) -> Iterator[ImageRegistry]:
    with open_registry(engine, tmp_path) as opened:
        yield opened


@pytest.fixture
def daemons(engine: APIClient, registry: ImageRegistry) -> Iterator[Daemons]:
    """Depends on the registry, so that no container has an image of it when the registry removes them."""
    with open_daemons(engine) as opened:
        yield opened


def start(daemons: Daemons, registry: ImageRegistry, **settings: str) -> Daemon:
    """Start a sandboxd that pulls all images of the test."""
    patterns = json.dumps([f"{registry.repository}/*"])
    return daemons.start(**{"sandbox_images_allowed": patterns, "pool_size": "0", **settings})


def is_in_engine(engine: APIClient, image: str) -> bool:
    try:
        engine.inspect_image(image)
    except docker.errors.ImageNotFound:
        return False
    return True


def cached_bytes(daemon: Daemon) -> int:
    return int(daemon.status()["image_cache"]["bytes"])


def test_an_image_is_pulled_by_the_first_session_that_uses_it(
    engine: APIClient, daemons: Daemons, registry: ImageRegistry
) -> None:
    image = registry.push("tool:v1", {"mark": b"one\n"})
    daemon = start(daemons, registry, sandbox_workspace="folder")
    with daemon.client() as client:
        opened = client.describe_open("acme:s1", SessionSpec(image=image, ttl_s=600.0))
        assert opened["image"] == image
        assert run_script(client, "acme:s1", READ) == "one\n"
        client.open("acme", "s2", SessionSpec(image=image))
        client.open(
            "acme",
            "s3",
            SessionSpec(image=image.replace(":v1", "@" + engine.inspect_image(image)["RepoDigests"][0][-71:])),
        )
    assert registry.count_pulls(image) == 1
    records = [json.loads(path.read_text()) for path in (daemon.state / "sessions").glob("*.json")]
    assert {record["plan"]["image_id"] for record in records} == {engine.inspect_image(image)["Id"]}
    wait_until(lambda: image in daemon.status()["images_present"], SOON_S, "the host reports the image")
    assert cached_bytes(daemon) > 0
    assert "image_pulled" in daemon.log()


def test_eight_concurrent_sessions_pull_an_image_once(daemons: Daemons, registry: ImageRegistry) -> None:
    image = registry.push("tool:v1", {"mark": b"one\n", "rest": secrets.token_bytes(20 * MIB)})
    daemon = start(daemons, registry)

    def open_session(number: int) -> str:
        with daemon.client() as client:
            return run_script(client, client.open("acme", f"s{number}", SessionSpec(image=image)), READ)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(open_session, range(8))) == ["one\n"] * 8
    assert registry.count_pulls(image) == 1
    assert daemon.log().count("image_pull_started") == 1


def test_an_image_that_does_not_exist_is_refused_with_what_to_do(daemons: Daemons, registry: ImageRegistry) -> None:
    registry.push("tool:v1", {"mark": b"one\n"})
    daemon = start(daemons, registry)
    with daemon.client() as client:
        for name in ("tool:v2", "nothing:v1"):
            with pytest.raises(ToolFailure, match=r"has no such image \(.*\); check the name") as refused:
                client.open("acme", "s", SessionSpec(image=f"{registry.repository}/{name}"))
            assert refused.value.code is ErrorCode.INVALID_ARGUMENTS
    status = daemon.status()
    assert (status["sessions"], status["room"]["taken"], status["image_cache"]["bytes"]) == (0, 0, 0)


def test_a_registry_that_does_not_answer_is_named(daemons: Daemons, registry: ImageRegistry) -> None:
    address = f"127.0.0.1:{reserve_port()}"
    daemon = start(daemons, registry, sandbox_images_allowed=json.dumps([f"{address}/*"]))
    with (
        daemon.client() as client,
        pytest.raises(SandboxUnavailable, match=f"cannot reach the registry {address} .*check the engine's network"),
    ):
        client.open("acme", "s", SessionSpec(image=f"{address}/tool:v1"))


@pytest.mark.parametrize("name", ["other/tool:v1", "{repository}-2/tool:v1", "localhost:{port}/{team}/tool:v1"])
def test_an_image_that_no_pattern_allows_is_not_pulled(daemons: Daemons, registry: ImageRegistry, name: str) -> None:
    registry.push("tool:v1", {"mark": b"one\n"})
    daemon = start(daemons, registry)
    address, _, team = registry.repository.partition("/")
    image = name.format(repository=registry.repository, port=address.rpartition(":")[2], team=team)
    with daemon.client() as client, pytest.raises(ToolFailure, match="is not allowed on this host") as refused:
        client.open("acme", "s", SessionSpec(image=image))
    assert refused.value.code is ErrorCode.INVALID_ARGUMENTS
    assert "image_pull_started" not in daemon.log()


def test_an_image_name_without_a_registry_is_never_pulled(daemons: Daemons, registry: ImageRegistry) -> None:
    daemon = start(daemons, registry, sandbox_images_allowed='["no-such-image:v1"]')
    with daemon.client() as client, pytest.raises(SandboxUnavailable, match="no image no-such-image:v1: build"):
        client.open("acme", "s", SessionSpec(image="no-such-image:v1"))
    assert "image_pull_started" not in daemon.log()


def test_a_session_keeps_its_image_when_the_tag_moves(
    engine: APIClient, daemons: Daemons, registry: ImageRegistry
) -> None:
    image = registry.push("tool:v1", {"mark": b"one\n"})
    daemon = start(daemons, registry, sandbox_workspace="folder")
    with daemon.client() as client:
        first = client.open("acme", "first", SessionSpec(image=image))
        assert run_script(client, first, READ + "; echo kept > file") == "one\n"
    registry.push("tool:v1", {"mark": b"two\n"}, keep=True)
    assert daemon.stop() == 0
    daemon.start()
    with daemon.client() as client:
        answer = bash(client, first, READ + '; echo "$(<file)"')
        assert answer.streams["merged"] == b"one\nkept\n"
        assert "the version of image" not in answer.done["sandbox"].get("news", "")
        assert run_script(client, client.open("acme", "second", SessionSpec(image=image)), READ) == "two\n"


def test_a_session_is_informed_that_its_image_was_removed(
    engine: APIClient, daemons: Daemons, registry: ImageRegistry
) -> None:
    image = registry.push("tool:v1", {"mark": b"one\n"})
    daemon = start(daemons, registry, sandbox_workspace="folder")
    with daemon.client() as client:
        name = client.open("acme", "s", SessionSpec(image=image))
    assert daemon.stop() == 0
    engine.remove_image(image)
    registry.push("tool:v1", {"mark": b"two\n"})
    daemon.start()
    with daemon.client() as client:
        answer = bash(client, name, READ)
    assert answer.streams["merged"] == b"two\n"
    assert "the version of image" in answer.done["sandbox"]["news"]


def test_the_least_recently_used_images_are_removed_and_images_in_use_stay(
    engine: APIClient, daemons: Daemons, registry: ImageRegistry
) -> None:
    images = [registry.push(f"tool-{at}:v1", {"mark": secrets.token_bytes(4 * MIB)}) for at in range(4)]
    own = registry.push("own:v1", {"mark": secrets.token_bytes(4 * MIB)}, keep=True)
    daemon = start(daemons, registry, image_cache_bytes=str(9 * MIB))
    with daemon.client() as client:
        client.open("acme", "s0", SessionSpec(image=images[0]))
        for at in (1, 2):
            client.close(client.open("acme", f"s{at}", SessionSpec(image=images[at])))
        wait_until(lambda: not is_in_engine(engine, images[1]), SOON_S, "the oldest unused image is removed")
        assert is_in_engine(engine, images[0])
        client.close(client.open("acme", "own", SessionSpec(image=own)))
        client.close(client.open("acme", "s3", SessionSpec(image=images[3])))
        wait_until(lambda: not is_in_engine(engine, images[2]), SOON_S, "the next image is removed")
        assert run_script(client, "acme:s0", "[ -s /mark ] && echo there") == "there\n"
    assert is_in_engine(engine, images[0])
    assert is_in_engine(engine, images[3])
    assert is_in_engine(engine, own)
    assert cached_bytes(daemon) <= 9 * MIB


def test_the_image_of_an_evicted_session_stays_across_a_restart(
    engine: APIClient, daemons: Daemons, registry: ImageRegistry
) -> None:
    image = registry.push("tool:v1", {"mark": b"one\n"})
    other = registry.push("other:v1", {"mark": b"two\n"})
    daemon = start(daemons, registry, sandbox_workspace="folder", image_cache_bytes="0")
    with daemon.client() as client:
        name = client.open("acme", "s", SessionSpec(image=image))
        assert daemon.stop() == 0
    assert daemon.containers() == {}
    daemon.start()
    with daemon.client() as client:
        client.close(client.open("acme", "t", SessionSpec(image=other)))
        wait_until(lambda: "image_cache_above_budget" in daemon.log(), SOON_S, "the budget is checked")
        assert is_in_engine(engine, image)
        assert run_script(client, name, READ) == "one\n"
        client.close(name)


def test_a_sandboxd_that_was_killed_after_the_pull_knows_the_image(
    engine: APIClient, daemons: Daemons, registry: ImageRegistry
) -> None:
    image = registry.push("tool:v1", {"mark": b"one\n", "rest": secrets.token_bytes(20 * MIB)})
    daemon = start(daemons, registry)
    opened: Future[None] = Future()

    def open_session() -> None:
        with daemon.client() as client:
            try:
                client.open("acme", "s", SessionSpec(image=image))
            except BaseException as error:  # noqa: BLE001  # the future holds it
                opened.set_exception(error)
            else:
                opened.set_result(None)

    threading.Thread(target=open_session, daemon=True).start()
    wait_until(lambda: is_in_engine(engine, image), SOON_S, "the image is pulled")
    daemon.kill()
    with contextlib.suppress(SandboxUnavailable):
        opened.result(SOON_S)
    daemon.start()
    wait_until(lambda: cached_bytes(daemon) > 20 * MIB, SOON_S, "the image is known again")
    with daemon.client() as client:
        assert run_script(client, client.open("acme", "s", SessionSpec(image=image)), READ) == "one\n"
    assert registry.count_pulls(image) == 1


def test_a_pull_interrupted_by_a_kill_is_repeated(engine: APIClient, daemons: Daemons, registry: ImageRegistry) -> None:
    image = registry.push("tool:v1", {"mark": b"one\n", "rest": secrets.token_bytes(60 * MIB)})
    daemon = start(daemons, registry)

    def open_session() -> None:
        with contextlib.suppress(SandboxUnavailable), daemon.client() as client:
            client.open("acme", "s", SessionSpec(image=image))

    opening = threading.Thread(target=open_session, daemon=True)
    opening.start()
    wait_until(lambda: "image_pull_started" in daemon.log(), SOON_S, "the pull begins")
    daemon.kill()
    opening.join(SOON_S)
    daemon.start()
    with daemon.client() as client:
        assert run_script(client, client.open("acme", "s", SessionSpec(image=image)), READ) == "one\n"
    assert cached_bytes(daemon) > 60 * MIB


async def test_a_client_opens_a_session_with_an_image_that_only_the_registry_has(
    engine: APIClient, registry: ImageRegistry
) -> None:
    """The whole path: the host reports its patterns, the orchestrator chooses the host, sandboxd pulls."""
    image = registry.push("tool:v1", {"mark": b"one\n"})
    environment = {
        "TOOLCREW_SANDBOX_IMAGES_ALLOWED": json.dumps([f"{registry.repository}/*"]),
        "TOOLCREW_POOL_SIZE": "0",
    }
    with open_stack(engine, environment) as stack:
        async with ToolClient.connect(stack.redis_url) as client:
            async with await client.open_session(image=image) as session:
                assert (await session.info()).image == image
                assert "one" in (await session.call("bash_tool", {"command": READ})).output
            for name, reason in (("tool:v2", "has no such image"), ("Tool", "invalid repository")):
                with pytest.raises(ToolFailure, match=reason) as refused:
                    await client.open_session(image=f"{registry.repository}/{name}")
                assert refused.value.code is ErrorCode.INVALID_ARGUMENTS
            with pytest.raises(ToolFailure, match=r"is not allowed on any host; allowed: .*/\*"):
                await client.open_session(image="ghcr.io/other/tool")
        wait_until(lambda: report_contains(stack, f'"images_present":["{image}"'), SOON_S, "the host reports the image")


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
async def test_an_embedded_stack_removes_the_images_that_ended_stacks_pulled(
    engine: APIClient, registry: ImageRegistry, tmp_path: Path, end: int
) -> None:
    images = [registry.push(f"tool-{at}:v1", {"mark": secrets.token_bytes(4 * MIB)}) for at in range(3)]
    environment = {
        "TOOLCREW_SANDBOX_IMAGES_ALLOWED": json.dumps([f"{registry.repository}/*"]),
        "TOOLCREW_IMAGE_CACHE_BYTES": str(9 * MIB),
        "XDG_STATE_HOME": str(tmp_path),
    }
    for image in images:
        with open_stack(engine, environment) as stack:
            async with ToolClient.connect(stack.redis_url) as client:
                await (await client.open_session(image=image)).close()
            if image == images[-1]:
                wait_until(lambda: not is_in_engine(engine, images[0]), SOON_S, "the oldest image is removed")
            stack.end(end)
    assert [is_in_engine(engine, image) for image in images] == [False, True, True]


def report_contains(stack: Stack, text: str) -> bool:
    with stack.open_redis() as redis:
        reports = [redis.get(key) for key in redis.scan_iter(match="*host.*", _type="string")]
    return any(text.encode() in report for report in reports if isinstance(report, bytes))


def test_only_the_class_with_a_login_pulls_a_private_image_and_its_password_stays_hidden(
    engine: APIClient, tmp_path: Path
) -> None:
    with open_registry(engine, tmp_path, needs_login=True) as registry, open_daemons(engine) as daemons:
        image = registry.push("tool:v1", {"mark": b"one\n"})
        other = registry.push("other:v1", {"mark": b"two\n"})
        password, wrong = tmp_path / "password", tmp_path / "wrong"
        password.write_text(f"{PASSWORD}\n")
        wrong.write_text("another-password")
        daemon = start(
            daemons,
            registry,
            tenant_classes=json.dumps(
                {
                    "builders": {"registries": {registry.address: {"user": USER, "password_file": str(password)}}},
                    "strangers": {"registries": {registry.address: {"user": USER, "password_file": str(wrong)}}},
                }
            ),
        )
        refusals = []
        with daemon.client() as client:
            for tenant_class in ("default", "strangers"):
                with pytest.raises(ToolFailure, match=r"refuses access .* 'registries' of the tenant class") as refused:
                    client.open("acme", "s", SessionSpec(image=image), policy=SandboxPolicy(tenant_class=tenant_class))
                refusals.append(str(refused.value))
            name = client.open("acme", "s", SessionSpec(image=image), policy=SandboxPolicy(tenant_class="builders"))
            assert run_script(client, name, READ) == "one\n"
            assert PASSWORD not in run_script(
                client, name, 'for file in /proc/*/{environ,cmdline}; do echo "$(<"$file")"; done 2>&1'
            )
            password.unlink()
            with pytest.raises(SandboxUnavailable, match=r"password file .* cannot be read"):
                client.open("acme", "t", SessionSpec(image=other), policy=SandboxPolicy(tenant_class="builders"))
        shown = "".join([*refusals, daemon.log(), json.dumps(daemon.status())])
        shown += "".join(path.read_text() for path in daemon.state.rglob("*.json"))
        assert PASSWORD not in shown
        assert "another-password" not in shown
        assert os.fspath(password) not in shown
