"""Pull, pin and removal of images, over an engine in memory."""

import asyncio
import secrets
from collections.abc import Sequence, Set
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

from tests.support.sandboxd.fake_sandboxd import FakeHost, open_host
from tests.support.stack.waiting import SOON_S, wait_until_async
from toolcrew.contract.errors import ErrorCode, SandboxUnavailable, ToolFailure
from toolcrew.contract.image_names import ImageName, parse_image_name
from toolcrew.contract.settings import SandboxdSettings
from toolcrew.contract.tenant_classes import RegistryLogin, TenantClass
from toolcrew.workers.sandboxd import images as images_module
from toolcrew.workers.sandboxd import pull_queue
from toolcrew.workers.sandboxd.images import ImageNotReady, ImageRefused, Images, PullDisk, explain_pull_failure
from toolcrew.workers.sandboxd.plans import Plans, SandboxPlan
from toolcrew.workers.sandboxd.records import ImageRecord, Records
from toolcrew.workers.sandboxd.runtime.engine_images import EngineImage, PullFailed, PullProgress, RegistryAccount
from toolcrew.workers.sandboxd.sessions import SessionParameters

PLANS = Plans(SandboxdSettings(sandbox_image="default", sandbox_images_allowed=["ghcr.io/team/*", "local"]))
SIZE = 100


class MemoryEngine:
    """An engine that has names and images, and a registry that has every image unless `failure` is set."""

    def __init__(self) -> None:
        self.images: dict[str, str] = {}
        """Complete name -> content id."""
        self.untagged: set[str] = set()
        self.containers: set[str] = set()
        self.pins: set[str] = set()
        self.pulled: list[str] = []
        self.accounts: list[RegistryAccount | None] = []
        self.failure: str | None = None
        self.checked: list[RegistryAccount | None] = []
        self.download_bytes = 2_000_000
        self.unpacked_bytes = 0
        """Bytes of an image that only `list` counts, as with an engine whose images containerd keeps."""
        self.pull_gate = asyncio.Event()
        self.pull_gate.set()
        self.remove_gate = asyncio.Event()
        self.remove_gate.set()
        self.removing = asyncio.Event()

    def tag(self, name: str, image_id: str | None = None) -> str:
        """Give an image a name, as an operator does."""
        full = parse_image_name(name).full
        if full in self.images:
            self.untagged.add(self.images[full])
        self.images[full] = image_id or f"sha256:{secrets.token_hex(32)}"
        return self.images[full]

    async def find(self, name: str) -> EngineImage | None:
        await asyncio.sleep(0)
        image_id = self.images.get(name, name)
        return next((image for image in self._all() if image.id == image_id), None)

    async def list(self) -> Sequence[EngineImage]:
        return [replace(image, size_bytes=image.size_bytes + self.unpacked_bytes) for image in self._all()]

    def _all(self) -> Sequence[EngineImage]:
        ids = sorted({*self.images.values(), *self.untagged})
        return [
            EngineImage(one, tuple(name for name, named_id in self.images.items() if named_id == one), (), SIZE)
            for one in ids
        ]

    async def used(self) -> Set[str]:
        await asyncio.sleep(0)
        return self.containers - self.pins

    async def remove(self, name: str) -> bool:
        self.removing.set()
        await self.remove_gate.wait()
        image_id = self.images.get(name, name)
        if image_id in self.containers:
            return False
        self.images.pop(name, None)
        if image_id not in self.images.values():
            self.untagged.discard(image_id)
        return True

    async def pull(self, name: ImageName, account: RegistryAccount | None, progress: PullProgress) -> None:
        self.pulled.append(name.full)
        self.accounts.append(account)
        progress.update(
            {"status": "Downloading", "id": "layer", "progressDetail": {"current": 10, "total": self.download_bytes}}
        )
        while not self.pull_gate.is_set():
            if progress.is_stopped:
                raise PullFailed("stopped")
            await asyncio.sleep(0.001)
        if self.failure is not None:
            raise PullFailed(self.failure)
        if name.full not in self.images:
            self.tag(name.full)

    async def check_access(self, name: ImageName, account: RegistryAccount | None) -> None:
        self.checked.append(account)
        if self.failure is not None:
            raise PullFailed(self.failure)


def build(engine: MemoryEngine, folder: Path, budget: int = 10 * SIZE, plans: Plans = PLANS) -> Images:
    engine.download_bytes = min(engine.download_bytes, budget)
    return Images(engine, plans, Records(folder), budget)


def plan_of(image: str, image_id: str | None = None) -> SandboxPlan:
    return replace(PLANS.standard(), image=image, image_id=image_id)


async def use(images: Images, image: str, tenant: str = "") -> str:
    async with images.pinned(plan_of(image), tenant=tenant) as plan:
        assert plan.image_id is not None
        return plan.image_id


@pytest.fixture
def engine() -> MemoryEngine:
    return MemoryEngine()


# Pulls


async def test_concurrent_requests_share_one_pull(engine: MemoryEngine, tmp_path: Path) -> None:
    images = build(engine, tmp_path, budget=10_000_000)
    engine.pull_gate.clear()
    waiting = [asyncio.create_task(use(images, "ghcr.io/team/a")) for _ in range(8)]
    await wait_until_async(lambda: engine.pulled, SOON_S, "the pull begins")
    (row,) = images.describe()["pulls"]
    assert (row["image"], row["bytes"], row["total_bytes"]) == ("ghcr.io/team/a:latest", 10, 2_000_000)
    waiting[0].cancel()
    engine.pull_gate.set()
    found = await asyncio.gather(*waiting[1:])
    assert set(found) == {engine.images["ghcr.io/team/a:latest"]}
    assert await use(images, "ghcr.io/team/a") == found[0]
    assert engine.pulled == ["ghcr.io/team/a:latest"]
    assert images.describe()["pulls"] == []


async def test_concurrent_and_waiting_pulls_are_limited(
    engine: MemoryEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull_queue, "MAX_PULLS", 6)
    images = build(engine, tmp_path)
    engine.pull_gate.clear()
    tasks = [asyncio.create_task(use(images, f"ghcr.io/team/a{number}", f"t{number % 3}")) for number in range(6)]
    await wait_until_async(lambda: len(images.describe()["pulls"]) == 6, SOON_S, "all wait")
    assert len(engine.pulled) == pull_queue.AT_ONCE
    with pytest.raises(SandboxUnavailable, match="6 images are already being pulled"):
        await use(images, "ghcr.io/team/b")
    with pytest.raises(SandboxUnavailable, match=r"no image local: build it, or pull it, .* begins with a registry"):
        await use(images, "local")
    engine.pull_gate.set()
    await asyncio.gather(*tasks)
    assert len(engine.pulled) == 6


async def test_slow_pulls_of_one_tenant_leave_a_turn_for_others(engine: MemoryEngine, tmp_path: Path) -> None:
    images = build(engine, tmp_path)
    engine.pull_gate.clear()
    names = [f"ghcr.io/team/slow{number}" for number in range(pull_queue.MAX_PULLS_OF_TENANT)]
    slow = [asyncio.create_task(use(images, name, "greedy")) for name in names]
    await wait_until_async(lambda: len(images.describe()["pulls"]) == len(names), 5, "all wait")
    with pytest.raises(SandboxUnavailable, match="for tenant greedy: try again"):
        await use(images, "ghcr.io/team/more", "greedy")
    # The other tenant has its turn with an image of its own, and with one that the greedy tenant has queued last.
    other = asyncio.create_task(use(images, names[-1], "other"))
    await wait_until_async(lambda: len(engine.pulled) == pull_queue.AT_ONCE, 5, "the other pull begins")
    assert parse_image_name(names[-1]).full in engine.pulled
    engine.pull_gate.set()
    await asyncio.gather(other, *slow)


async def test_pull_of_an_image_larger_than_the_cache_is_stopped(engine: MemoryEngine, tmp_path: Path) -> None:
    images = build(engine, tmp_path)
    engine.download_bytes = 10 * SIZE + 1
    engine.pull_gate.clear()
    with pytest.raises(ImageRefused, match=r"needs more than the 1000 bytes .*; use a smaller image"):
        await use(images, "ghcr.io/team/a")
    assert images.describe()["pulls"] == Records(tmp_path).images() == []


@pytest.mark.parametrize(("free", "kind"), [(49, SandboxUnavailable), (150, ImageRefused)])
async def test_pull_that_fills_the_disk_is_stopped(
    engine: MemoryEngine, tmp_path: Path, free: int, kind: type[Exception]
) -> None:
    other_writes = 256 * 1024 * 1024
    left, budget = [other_writes + 1151] if kind is ImageRefused else [1000], 1000
    engine.download_bytes = budget
    engine.pull_gate.clear()
    images = Images(engine, PLANS, Records(tmp_path), budget, PullDisk(lambda: left[0], 50))
    request = asyncio.create_task(use(images, "ghcr.io/team/a"))
    await wait_until_async(lambda: engine.pulled, 5, "the pull begins")
    left[0] = free
    with pytest.raises(kind) as refused:
        await request
    assert type(refused.value) is kind
    assert str(refused.value).startswith("image ghcr.io/team/a:latest was not pulled: ")


async def test_pull_continues_after_its_request_times_out(engine: MemoryEngine, tmp_path: Path) -> None:
    images = build(engine, tmp_path, budget=10_000_000)
    engine.pull_gate.clear()
    with pytest.raises(ImageNotReady, match=r"still being pulled \(0 MB of at least 2 MB\): try again"):
        async with images.pinned(plan_of("ghcr.io/team/a"), 0.01):
            pass
    engine.pull_gate.set()
    await use(images, "ghcr.io/team/a")
    assert len(engine.pulled) == 1


@pytest.mark.parametrize(
    ("reason", "kind", "message"),
    [
        ("manifest for x not found: manifest unknown", ImageRefused, "has no such image"),
        ("pull access denied for x, repository does not exist or may require", ImageRefused, "add a login for ghcr.io"),
        ("unauthorized: authentication required", ImageRefused, "add a login for"),
        ("no matching manifest for linux/arm64", ImageRefused, "use another image"),
        ("toomanyrequests: slow down", SandboxUnavailable, "limits pulls"),
        ("write /var/lib/docker/x: no space left on device", SandboxUnavailable, "free space there"),
        ('Get "https://x/v2/": dial tcp: lookup x: no such host', SandboxUnavailable, "cannot reach the registry ghcr"),
        ("dial tcp 127.0.0.1:1: connect: connection refused", SandboxUnavailable, "cannot reach"),
        ("x509: certificate signed by unknown authority", SandboxUnavailable, "certificates"),
        ("something else", SandboxUnavailable, "something else; see the log"),
    ],
)
def test_pull_error_says_what_to_do(reason: str, kind: type[Exception], message: str) -> None:
    error = explain_pull_failure(reason, parse_image_name("ghcr.io/team/a"), has_login=False)
    assert type(error) is kind
    assert message in str(error)
    assert str(error).startswith("image ghcr.io/team/a:latest was not pulled: ")


async def test_registry_login_is_used_only_for_its_class_and_registry_and_is_masked(
    engine: MemoryEngine, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("very-secret\n")
    login, entries = RegistryLogin(user="robot", password_file=secret), ("ghcr.io/team/*", "quay.io/*")
    classes = {
        "team": TenantClass(images=entries, registries={"GHCR.io": login}),
        "others": TenantClass(images=entries, registries={"quay.io": login}),
    }
    images = build(engine, tmp_path, plans=Plans(SandboxdSettings(sandbox_image="default", tenant_classes=classes)))
    team_plan, other_plan = (replace(plan_of("ghcr.io/team/a"), tenant_class=name) for name in classes)
    engine.failure = "denied: robot:very-secret is wrong"
    with pytest.raises(ImageRefused, match=r"check the login of ghcr\.io") as refused:
        async with images.pinned(team_plan):
            pass
    assert "very-secret" not in str(refused.value)
    assert "very-secret" not in repr(engine.accounts)
    assert engine.accounts == [RegistryAccount("robot", "very-secret")]
    with pytest.raises(ImageRefused, match=r"add a login for ghcr\.io"):
        async with images.pinned(other_plan):
            pass
    assert engine.accounts[1:] == [None]
    secret.unlink()
    with pytest.raises(SandboxUnavailable, match=r"password file for the registry ghcr\.io cannot be read \(File"):
        async with images.pinned(team_plan):
            pass


async def test_private_image_is_used_only_by_classes_that_the_registry_lets_read_it(
    engine: MemoryEngine, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("very-secret")
    login, images_of_all = RegistryLogin(user="robot", password_file=secret), ("ghcr.io/team/*",)
    classes = {
        "team": TenantClass(images=images_of_all, registries={"ghcr.io": login}),
        "partner": TenantClass(images=images_of_all, registries={"ghcr.io": login}),
        "others": TenantClass(images=images_of_all),
    }
    plans = Plans(SandboxdSettings(sandbox_image="default", tenant_classes=classes))
    images = build(engine, tmp_path, plans=plans)

    async def use_as(name: str, image: str = "ghcr.io/team/a") -> None:
        async with images.pinned(replace(plan_of(image), tenant_class=name)):
            pass

    await use_as("team")
    # Also after a restart, and under another name of the same content.
    images = build(engine, tmp_path, plans=plans)
    engine.tag("ghcr.io/team/a:v1", engine.images["ghcr.io/team/a:latest"])
    engine.failure = "denied: requested access to the resource is denied"
    for image in ("ghcr.io/team/a", "ghcr.io/team/a:v1"):
        with pytest.raises(ImageRefused, match=r"add a login for ghcr\.io"):
            await use_as("others", image)
    await use_as("team")
    engine.failure = None
    await use_as("partner")
    await use_as("partner")
    assert engine.checked == [None, None, RegistryAccount("robot", "very-secret")]
    engine.failure = "denied"
    await use_as("partner")
    with pytest.raises(ImageRefused):
        await use_as("others")
    engine.failure = None
    await use_as("others")
    assert len(engine.pulled) == 1


async def test_image_that_a_dead_sandboxd_pulled_with_a_login_stays_private(
    engine: MemoryEngine, tmp_path: Path
) -> None:
    Records(tmp_path).keep_image(ImageRecord("ghcr.io/team/a:latest", None, None, 0, 0.0, ("team",)))
    engine.tag("ghcr.io/team/a")
    images = build(engine, tmp_path)
    await images.refresh()
    engine.failure = "denied"
    with pytest.raises(ImageRefused):
        await use(images, "ghcr.io/team/a")


@pytest.mark.parametrize("registry", ["team", "ghcr.io/team", "", "*.io", "https://ghcr.io"])
def test_registry_login_with_an_invalid_registry_name_is_refused(registry: str) -> None:
    login = RegistryLogin(user="robot", password_file=Path("/secret"))
    with pytest.raises(ValidationError, match="registries"):
        TenantClass(registries={registry: login})
    assert list(TenantClass(registries={"index.docker.io": login}).registries) == ["docker.io"]


# Removal


async def test_evict_keeps_images_in_use_and_images_not_pulled_by_sandboxd(
    engine: MemoryEngine, tmp_path: Path
) -> None:
    images = build(engine, tmp_path, budget=0)
    own = engine.tag("ghcr.io/team/own")
    await use(images, "ghcr.io/team/own")
    by_container, by_session = [await use(images, f"ghcr.io/team/{name}") for name in ("a", "b")]
    engine.containers.add(by_container)
    images.in_use = lambda: {by_session}
    async with images.pinned(plan_of("ghcr.io/team/c")) as plan:
        await images.evict()
        assert set(engine.images.values()) == {own, by_container, by_session, plan.image_id}
    await images.evict()
    assert set(engine.images.values()) == {own, by_container, by_session}
    engine.containers.clear()
    images.in_use = frozenset
    await images.evict()
    assert set(engine.images.values()) == {own}


async def test_evict_releases_the_pins_of_an_image_first(engine: MemoryEngine, tmp_path: Path) -> None:
    images = build(engine, tmp_path, budget=0)
    pinned = await use(images, "ghcr.io/team/a")
    engine.containers.add(pinned)
    engine.pins.add(pinned)

    async def release(image_id: str) -> None:
        engine.containers.discard(image_id)

    images.release = release
    await images.evict()
    assert engine.images == {}


async def test_evict_keeps_a_name_that_was_moved_to_another_image(engine: MemoryEngine, tmp_path: Path) -> None:
    images = build(engine, tmp_path, budget=0)
    pulled = await use(images, "ghcr.io/team/a")
    moved = engine.tag("ghcr.io/team/a")
    await images.evict()
    assert set(engine.images.values()) == {moved}
    assert pulled not in engine.untagged
    assert images.describe()["image_cache"]["bytes"] == 0


async def test_evict_keeps_an_image_that_the_operator_also_tagged(engine: MemoryEngine, tmp_path: Path) -> None:
    images = build(engine, tmp_path, budget=0)
    pulled = await use(images, "ghcr.io/team/a")
    engine.tag("mine", pulled)
    await images.evict()
    assert len(engine.images) == 2
    assert Records(tmp_path).images() == []


async def test_request_waits_for_a_running_removal_and_pulls_again(engine: MemoryEngine, tmp_path: Path) -> None:
    images = build(engine, tmp_path, budget=0)
    first = await use(images, "ghcr.io/team/a")
    engine.remove_gate.clear()
    eviction = asyncio.create_task(images.evict())
    await engine.removing.wait()
    request = asyncio.create_task(use(images, "ghcr.io/team/a"))
    await asyncio.sleep(0.05)
    assert not request.done()
    engine.remove_gate.set()
    await eviction
    assert await request != first


async def test_evict_never_removes_a_pinned_image_under_random_load(engine: MemoryEngine, tmp_path: Path) -> None:
    images = build(engine, tmp_path, budget=2 * SIZE)

    async def work(number: int) -> None:
        for round_ in range(20):
            async with images.pinned(plan_of(f"ghcr.io/team/a{(number * 7 + round_) % 5}")) as plan:
                for _ in range((number + round_) % 4):
                    await asyncio.sleep(0)
                assert plan.image_id in engine.images.values()

    async def evict() -> None:
        while True:
            await images.evict()
            await asyncio.sleep(0)

    eviction = asyncio.create_task(evict())
    await asyncio.gather(*(work(number) for number in range(8)))
    eviction.cancel()
    await images.evict()
    assert len(engine.images) <= 2


# Restarts


@pytest.mark.parametrize("is_complete", [True, False])
async def test_interrupted_pull_is_recorded_only_if_the_image_arrived(
    engine: MemoryEngine, tmp_path: Path, is_complete: bool
) -> None:
    images = build(engine, tmp_path)
    engine.pull_gate.clear()
    request = asyncio.create_task(use(images, "ghcr.io/team/a"))
    await wait_until_async(lambda: engine.pulled, SOON_S, "the pull begins")
    await images.close()
    request.cancel()
    with suppress(asyncio.CancelledError, SandboxUnavailable):
        await request
    if is_complete:
        engine.tag("ghcr.io/team/a")
    images = build(engine, tmp_path)
    await images.refresh()
    assert images.describe()["image_cache"]["bytes"] == (SIZE if is_complete else 0)
    assert len(Records(tmp_path).images()) == int(is_complete)


async def test_refresh_keeps_an_image_that_arrives_during_the_list_request(
    engine: MemoryEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = build(engine, tmp_path)
    engine.pull_gate.clear()
    request = asyncio.create_task(use(images, "ghcr.io/team/a"))
    await wait_until_async(lambda: engine.pulled, SOON_S, "the pull begins")
    listed = await engine.list()

    async def list_late() -> Sequence[EngineImage]:
        engine.pull_gate.set()
        await request
        return listed

    monkeypatch.setattr(engine, "list", list_late)
    await images.refresh()
    assert images.describe()["image_cache"]["bytes"] == SIZE


async def test_cache_counts_the_unpacked_layers_that_only_the_list_of_images_counts(
    engine: MemoryEngine, tmp_path: Path
) -> None:
    images = build(engine, tmp_path, budget=3 * SIZE)
    for name in ("ghcr.io/team/a", "ghcr.io/team/b"):
        await use(images, name)
    await images.refresh()
    await images.evict()
    assert len(engine.images) == 2
    engine.unpacked_bytes = SIZE
    await images.refresh()
    assert images.describe()["image_cache"]["bytes"] == 4 * SIZE
    await images.evict()
    assert list(engine.images) == ["ghcr.io/team/b:latest"]


async def test_report_lists_present_images_that_a_pattern_allows(
    engine: MemoryEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = build(engine, tmp_path)
    for name in ("default", "local", "ghcr.io/other/a", "ghcr.io/team/b:v2"):
        engine.tag(name)
    await use(images, "ghcr.io/team/a")
    await images.refresh()
    assert images.describe()["images_present"] == ["ghcr.io/team/a:latest", "ghcr.io/team/b:v2"]
    monkeypatch.setattr(images_module, "MAX_PRESENT_CHARS", 30)
    await images.refresh()
    assert images.describe()["images_present"] == ["ghcr.io/team/a:latest"]


# Sessions


def give_images(host: FakeHost, engine: MemoryEngine, folder: Path) -> None:
    host.factory.images = build(engine, folder)
    host.factory.images.in_use = lambda: {session.plan.image_id for session in host.sessions.all()}


async def test_session_keeps_the_content_id_of_its_image_across_restores(engine: MemoryEngine, tmp_path: Path) -> None:
    async with open_host(tmp_path, plans=PLANS) as host:
        give_images(host, engine, tmp_path / "images")
        entry = await host.sessions.open("acme:s", SessionParameters(plan_of("ghcr.io/team/a"), 60))
        assert entry.plan.image_id == engine.images["ghcr.io/team/a:latest"]
        assert host.engine.guests[0].config["Image"] == entry.plan.image_id
        assert await host.sessions.suspender.give_up(entry, must_be_idle=False)
        (record,) = host.records.sessions()
        assert record.plan.image_id == entry.plan.image_id
        engine.tag("ghcr.io/team/a")
        await host.sessions.use("acme:s")
        assert host.engine.guests[-1].config["Image"] == entry.plan.image_id == record.plan.image_id
        assert entry.news is None
        assert await host.sessions.suspender.give_up(entry, must_be_idle=False)
        engine.untagged.clear()
        await host.sessions.use("acme:s")
        assert entry.plan.image_id == engine.images["ghcr.io/team/a:latest"]
        assert "image ghcr.io/team/a" in str(entry.news)


async def test_missing_image_fails_the_open_as_invalid_arguments(engine: MemoryEngine, tmp_path: Path) -> None:
    async with open_host(tmp_path, plans=PLANS) as host:
        give_images(host, engine, tmp_path / "images")
        engine.failure = "manifest unknown"
        with pytest.raises(ToolFailure, match="has no such image") as refused:
            await host.sessions.open("acme:s", SessionParameters(plan_of("ghcr.io/team/a"), 60))
        assert refused.value.code is ErrorCode.INVALID_ARGUMENTS
        engine.failure = "connection refused"
        with pytest.raises(SandboxUnavailable, match="cannot reach"):
            await host.sessions.open("acme:s", SessionParameters(plan_of("ghcr.io/team/a"), 60))
        assert host.factory.slots.used == 0


async def test_pull_uses_no_sandbox_slot(engine: MemoryEngine, tmp_path: Path) -> None:
    async with open_host(tmp_path, plans=PLANS, limit=1) as host:
        give_images(host, engine, tmp_path / "images")
        engine.tag("local")
        engine.pull_gate.clear()
        opening = asyncio.create_task(host.sessions.open("acme:s", SessionParameters(plan_of("ghcr.io/team/a"), 60)))
        await wait_until_async(lambda: engine.pulled, SOON_S, "the pull begins")
        await host.sessions.open("acme:t", SessionParameters(plan_of("local"), 60))
        await host.sessions.close("acme:t")
        engine.pull_gate.set()
        await opening
