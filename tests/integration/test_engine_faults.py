"""A faulty or overloaded engine: stubs that never answer correctly, and the real engine behind a relay that stalls."""

import asyncio
import secrets
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import docker.errors
import pytest
from docker import APIClient
from structlog.testing import capture_logs

from tests.support.sandboxd.containers import IMAGE, build_config, open_engine
from tests.support.sandboxd.engine_stubs import (
    Behaviour,
    answers_nothing,
    answers_something_else,
    drips,
    refuses,
    relayed_engine,
    stalls_in_its_header,
    stub_engine,
    talks_garbage,
)
from tests.support.stack.waiting import until
from toolcrew.contract.errors import SandboxUnavailable
from toolcrew.workers.sandboxd.runtime.base import LABEL_DEPLOYMENT, LABEL_PRODUCT
from toolcrew.workers.sandboxd.runtime.engine import Engine
from toolcrew.workers.sandboxd.runtime.engine_gate import EngineCallKinds, EngineSilent, Lane
from toolcrew.workers.sandboxd.runtime.volumes import PRODUCT_GUEST

LONG_DEADLINE_S = 15.0
DEPLOYMENT = f"faults-{secrets.token_hex(4)}"


def lanes(deadline_s: float, starts_s: float) -> EngineCallKinds:
    """Return lanes that run two requests of each kind at a time. All kinds have the same deadline, except starts."""
    starts = Lane("starts", at_once=2, deadline_s=starts_s)
    others = [Lane(name, at_once=2, deadline_s=deadline_s) for name in ("removals", "start checks", "freezes", "fills")]
    return EngineCallKinds(starts, *others, probe_s=deadline_s)


@asynccontextmanager
async def open_engine_client(
    monkeypatch: pytest.MonkeyPatch, path: Path, deadline_s: float = LONG_DEADLINE_S, starts_s: float = LONG_DEADLINE_S
) -> AsyncIterator[Engine]:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{path}")
    engine = Engine(lanes(deadline_s, starts_s), late_pauses_s=(0.0, 0.1, 0.2, 0.4, 0.8))
    try:
        yield engine
    finally:
        engine.close()


@pytest.fixture(scope="module")
def api() -> APIClient:
    return open_engine()


@pytest.fixture
def config(api: APIClient) -> Iterator[dict[str, Any]]:
    """Yield the configuration of a sandbox with the label of this module. Containers that remain at the end fail the
    test and are removed.
    """
    yield {**build_config(api), "Labels": {LABEL_PRODUCT: "sandbox", LABEL_DEPLOYMENT: DEPLOYMENT}}
    leftovers = api.containers(all=True, filters={"label": f"{LABEL_DEPLOYMENT}={DEPLOYMENT}"})
    for container in leftovers:
        api.remove_container(container["Id"], force=True)
    assert leftovers == []


@pytest.mark.parametrize(
    ("behaviour", "deadline_s", "message", "later_words"),
    [
        (answers_nothing, 0.1, "did not answer within 0.1 s", "does not finish any of 2 start checks"),
        (stalls_in_its_header, 0.1, "did not answer within 0.1 s", "does not finish any of 2 start checks"),
        (drips, 0.1, "did not answer within 0.1 s", "does not finish any of 2 start checks"),
        (talks_garbage, LONG_DEADLINE_S, "does not answer", "has not answered since"),
        (answers_something_else, LONG_DEADLINE_S, "cannot be read", "has not answered since"),
    ],
    ids=["silent", "stalling", "dripping", "garbage", "another server"],
)
async def test_an_engine_without_valid_answers_is_reported_in_time_and_not_called_again(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    behaviour: Behaviour,
    deadline_s: float,
    message: str,
    later_words: str,
) -> None:
    before = threading.active_count()
    async with (
        stub_engine(tmp_path / "engine", behaviour),
        open_engine_client(monkeypatch, tmp_path / "engine", deadline_s) as engine,
    ):
        looks = await asyncio.gather(*(engine.facts() for _ in range(20)), return_exceptions=True)
        later = await asyncio.gather(engine.facts(), return_exceptions=True)

        assert all(isinstance(look, SandboxUnavailable) for look in [*looks, *later])
        assert any(message in str(look) for look in looks)
        assert later_words in str(later[0])
        assert threading.active_count() <= before + 3
    await until(lambda: threading.active_count() <= before)


async def test_an_unreachable_engine_is_reported_with_what_to_check(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with open_engine_client(monkeypatch, tmp_path / "unknown") as engine:
        for call in (engine.facts(), engine.image_id(IMAGE), engine.remove("x")):
            with pytest.raises(
                EngineSilent, match=r"does not answer .*: start it, or check DOCKER_HOST and your rights"
            ):
                await call
        with pytest.raises(SandboxUnavailable, match=r"has not answered since .* \(3 times in a row"):
            await engine.pause("x")


async def test_an_answer_of_another_server_is_not_accepted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async with stub_engine(tmp_path / "engine", answers_something_else):
        operations: tuple[Callable[[Engine], Awaitable[object]], ...] = (
            Engine.facts,
            partial(Engine.image_id, image=IMAGE),
            partial(Engine.find_image, image=IMAGE),
            partial(Engine.inspect, container="x"),
            partial(Engine.list_containers, deployment="x"),
            partial(Engine.ensure_guest_volume, image=IMAGE),
        )
        for ask in operations:
            async with open_engine_client(monkeypatch, tmp_path / "engine") as engine:
                with pytest.raises(EngineSilent, match="cannot be read"):
                    await ask(engine)


async def test_a_refusal_of_the_engine_is_quoted_and_the_engine_is_called_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with (
        stub_engine(tmp_path / "engine", refuses(b"no space left on device")),
        open_engine_client(monkeypatch, tmp_path / "engine") as engine,
    ):
        for _ in range(5):
            with pytest.raises(SandboxUnavailable, match="the Docker engine refused: no space left on device"):
                await engine.start({"Image": IMAGE}, "toolcrew-x")

        assert engine.describe()["breaker"] == "closed"


async def test_an_engine_that_reports_its_own_timeout_counts_as_silent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    message = b"containerd: context deadline exceeded"
    async with (
        stub_engine(tmp_path / "engine", refuses(message)),
        open_engine_client(monkeypatch, tmp_path / "engine") as engine,
    ):
        for _ in range(3):
            with pytest.raises(EngineSilent, match="context deadline exceeded"):
                await engine.image_id(IMAGE)

        assert engine.describe()["breaker"] == "open"


async def test_a_container_created_after_the_start_deadline_is_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, config: dict[str, Any]
) -> None:
    async with (
        relayed_engine(tmp_path / "engine") as relay,
        open_engine_client(monkeypatch, tmp_path / "engine", starts_s=0.5) as engine,
    ):
        await engine.facts()  # the next request is then the creation
        relay.stall()
        with capture_logs() as logs:
            with pytest.raises(EngineSilent, match="did not answer within"):
                await engine.start(config, f"toolcrew-late-{secrets.token_hex(8)}")
            relay.resume()
            # On a busy machine the creation may begin after the deadline, and is then remembered at its end.
            await until(lambda: "late_container_removed" in [entry["event"] for entry in logs])
            await until(lambda: engine.describe()["late_starts"] == 0)


async def test_a_start_whose_caller_was_cancelled_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, config: dict[str, Any]
) -> None:
    async with (
        relayed_engine(tmp_path / "engine") as relay,
        open_engine_client(monkeypatch, tmp_path / "engine") as engine,
    ):
        await engine.facts()
        relay.stall()
        start = asyncio.create_task(engine.start(config, f"toolcrew-left-{secrets.token_hex(8)}"))
        await relay.held.wait()
        start.cancel()
        await asyncio.wait({start})
        relay.resume()

        await until(lambda: engine.describe()["late_starts"] == 0 and engine.describe()["running"]["starts"] == 0)


async def test_a_start_whose_connection_was_cut_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, config: dict[str, Any]
) -> None:
    async with (
        relayed_engine(tmp_path / "engine") as relay,
        open_engine_client(monkeypatch, tmp_path / "engine") as engine,
    ):
        await engine.facts()
        relay.stall()
        start = asyncio.create_task(engine.start(config, f"toolcrew-cut-{secrets.token_hex(8)}"))
        await relay.held.wait()
        relay.resume()
        await asyncio.sleep(0)
        relay.cut()

        with pytest.raises(EngineSilent, match="does not answer"):
            await start
        await until(lambda: engine.describe()["late_starts"] == 0)


async def test_an_engine_that_hung_is_used_again_after_it_recovers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, config: dict[str, Any]
) -> None:
    async with (
        relayed_engine(tmp_path / "engine") as relay,
        open_engine_client(monkeypatch, tmp_path / "engine") as engine,
    ):
        relay.stall()
        hasty = [asyncio.create_task(asyncio.wait_for(engine.image_id(IMAGE), 0.05)) for _ in range(2)]
        await asyncio.wait(hasty)
        relay.resume()
        await until(lambda: engine.describe()["running"]["start checks"] == 0)

        attached = await engine.start(config, f"toolcrew-back-{secrets.token_hex(8)}")
        attached.sock.close()
        await engine.remove(attached.id)


async def test_connections_that_broke_while_idle_fail_no_call(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, api: APIClient
) -> None:
    async with (
        relayed_engine(tmp_path / "engine") as relay,
        open_engine_client(monkeypatch, tmp_path / "engine") as engine,
    ):
        first = await engine.facts()
        relay.cut()
        await asyncio.sleep(0)

        assert await engine.facts() == first
        assert engine.describe()["failures"] == 0


async def test_a_paused_sandbox_is_listed_resumed_and_removed(config: dict[str, Any], api: APIClient) -> None:
    engine = Engine()
    try:
        attached = await engine.start(config, f"toolcrew-frozen-{secrets.token_hex(8)}")
        for _ in range(2):
            await engine.pause(attached.id)
        listed = await engine.list_containers(DEPLOYMENT)
        for _ in range(2):
            await engine.unpause(attached.id)
        running = api.inspect_container(attached.id)["State"]["Paused"] is False
        await engine.pause(attached.id)
        await engine.remove(attached.id)

        assert [(one.id, one.state, one.labels[LABEL_DEPLOYMENT]) for one in listed] == [
            (attached.id, "paused", DEPLOYMENT)
        ]
        assert running
        assert await engine.list_containers(DEPLOYMENT) == []
        with pytest.raises(SandboxUnavailable, match="container was removed"):
            await engine.unpause(attached.id)
    finally:
        attached.sock.close()
        engine.close()


async def test_sandboxes_of_another_deployment_are_not_listed(config: dict[str, Any]) -> None:
    engine = Engine()
    attached = await engine.start(config, f"toolcrew-other-{secrets.token_hex(8)}")
    try:
        assert await engine.list_containers(f"{DEPLOYMENT}-other") == []
    finally:
        attached.sock.close()
        await engine.remove(attached.id)
        engine.close()


async def test_a_refused_start_is_quoted_and_leaves_nothing(config: dict[str, Any]) -> None:
    engine = Engine()
    try:
        with pytest.raises(SandboxUnavailable, match=r"the Docker engine refused: .*no-such-python"):
            await engine.start(
                {**config, "Entrypoint": ["/no-such-python"]}, f"toolcrew-refused-{secrets.token_hex(8)}"
            )
        with pytest.raises(SandboxUnavailable, match=r"the engine has no image no-such-image:ever: build it"):
            await engine.start({**config, "Image": "no-such-image:ever"}, f"toolcrew-refused-{secrets.token_hex(8)}")

        assert await engine.list_containers(DEPLOYMENT) == []
    finally:
        engine.close()


@pytest.fixture
def own_image(api: APIClient) -> Iterator[str]:
    """Yield an image that no other test uses to fill a volume."""
    name = f"toolcrew-test-{secrets.token_hex(6)}:latest"
    container = api.create_container(IMAGE, entrypoint=["true"])["Id"]
    try:
        api.commit(
            container,
            repository=name.partition(":")[0],
            tag="latest",
            changes=f"LABEL toolcrew.test={name.partition(':')[0]}",
        )
        volume = f"toolcrew-guest-{api.inspect_image(name)['Id'].partition(':')[2][:12]}"  # type: ignore[no-untyped-call]
        yield name
        try:
            api.remove_volume(volume)  # first, because other tests may remove a volume whose image is missing
        except docker.errors.NotFound:
            pytest.fail("the volume was not there")
        finally:
            api.remove_image(name, force=True)
    finally:
        api.remove_container(container, force=True)


async def test_two_sandboxds_fill_a_partly_filled_guest_volume_concurrently(api: APIClient, own_image: str) -> None:
    identity = api.inspect_image(own_image)["Id"]  # type: ignore[no-untyped-call]
    volume = f"toolcrew-guest-{identity.partition(':')[2][:12]}"
    api.create_volume(volume)
    write_partial_volume(api, own_image, volume)
    first, second = Engine(), Engine()
    try:
        names = await asyncio.gather(first.ensure_guest_volume(own_image), second.ensure_guest_volume(own_image))
        again = await first.ensure_guest_volume(own_image)

        assert [*names, again] == [volume] * 3
        with pytest.raises(SandboxUnavailable, match="the engine has no image"):
            await first.ensure_guest_volume("no-such-image:ever")
    finally:
        first.close()
        second.close()


def add_guest_volume(api: APIClient, image: str) -> str:
    """Add a guest volume for the image with that id; the engine may lack the image."""
    name = f"toolcrew-guest-{image.rpartition(':')[2][:12]}"
    api.create_volume(name, labels={LABEL_PRODUCT: PRODUCT_GUEST})
    return name


async def test_a_new_guest_volume_removes_unused_volumes_of_removed_images(api: APIClient, own_image: str) -> None:
    unused, used = (add_guest_volume(api, secrets.token_hex(32)) for _ in range(2))
    current = add_guest_volume(api, api.inspect_image(IMAGE)["Id"])  # type: ignore[no-untyped-call]
    host = api.create_host_config(mounts=[docker.types.Mount("/opt/toolcrew", used)], network_mode="none")
    holder = api.create_container(IMAGE, host_config=host)["Id"]
    engine = Engine()
    try:
        made = await engine.ensure_guest_volume(own_image)
        remaining = {volume["Name"] for volume in api.volumes()["Volumes"]}

        assert {made, current, used} <= remaining
        assert unused not in remaining
    finally:
        engine.close()
        api.remove_container(holder, force=True)
        api.remove_volume(used)


def write_partial_volume(api: APIClient, image: str, volume: str) -> None:
    """Leave a single file in the volume, as a killed fill does."""
    script = "rm -rf /opt/toolcrew/* ; echo half > /opt/toolcrew/half"
    host = api.create_host_config(mounts=[docker.types.Mount("/opt/toolcrew", volume)], network_mode="none")
    container = api.create_container(image, entrypoint=["sh", "-c", script], user="0", host_config=host)["Id"]
    api.start(container)
    api.wait(container)
    api.remove_container(container, force=True)


async def test_a_socket_without_a_listener_is_reported_as_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "deaf"
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.bind(str(path))  # no process listens
        async with open_engine_client(monkeypatch, path) as engine:
            with pytest.raises(EngineSilent, match="refused"):
                await engine.facts()
