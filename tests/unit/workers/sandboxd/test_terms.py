"""A tenant's terms never give more than its class. Stricter terms and changed secrets apply from the next call."""

import asyncio
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.support.sandboxd.egress_harness import open_harness
from tests.support.sandboxd.fake_sandboxd import (
    PLAN,
    MemoryWorkspaces,
    Sandboxd,
    build_host,
    open_host,
    running_sandboxd,
)
from tests.support.sandboxd.sandboxd_calls import EXEC, call, frame, raw_exchange
from tests.support.sandboxd.secret_harness import ask_proxy
from tests.support.stack.waiting import SOON_S
from toolcrew.contract.errors import ConfigError, ErrorCode, SandboxUnavailable, ToolFailure
from toolcrew.contract.secrets import build_placeholder
from toolcrew.contract.session_spec import LargestOptions, SandboxOptions
from toolcrew.contract.settings import SandboxdSettings
from toolcrew.contract.tenancy import SandboxPolicy
from toolcrew.contract.tenant_classes import EgressRules, TenantClass
from toolcrew.workers.sandboxd.egress import secrets as module
from toolcrew.workers.sandboxd.plans import BYTES_PER_INODE, Plans, SandboxPlan, limits_of, load_plans
from toolcrew.workers.sandboxd.runtime.hardening import AUTHORITIES
from toolcrew.workers.sandboxd.sandbox import Sandbox
from toolcrew.workers.sandboxd.session import HostSession
from toolcrew.workers.sandboxd.sessions import SessionParameters

MIB = 1024 * 1024
IMAGES = ("default", "python", "node", "evil")
CLASSES = {
    "open": TenantClass(
        network="egress",
        egress=EgressRules(hosts=("site.example",)),
        images=("python", "node"),
        workspace_bytes=512 * MIB,
    ),
    "closed": TenantClass(runtime="runsc", pids=32, image="node", images=()),
}


def build_plans(classes: dict[str, TenantClass] = CLASSES) -> Plans:
    return Plans(
        SandboxdSettings(sandbox_image="default", tenant_classes=classes, egress_socket=Path("/run/egress.sock"))
    )


PLANS = build_plans()
any_terms = st.builds(
    SandboxPolicy,
    tenant_class=st.sampled_from(["default", "open", "closed"]),
    images=st.none() | st.lists(st.sampled_from(IMAGES), max_size=4).map(tuple),
    network=st.sampled_from([None, "none", "egress"]),
    workspace_bytes=st.none() | st.integers(MIB, 1024 * MIB),
)
requested_images = st.none() | st.sampled_from(IMAGES)
requested_networks = st.sampled_from([None, "none", "egress"])


def choose(terms: SandboxPolicy, image: str | None = None, network: str | None = None) -> SandboxPlan | None:
    try:
        return PLANS.choose(terms, image, network)
    except ToolFailure:
        return None


# Plans


@given(any_terms, requested_images, requested_networks)
def test_terms_never_exceed_the_class(terms: SandboxPolicy, image: str | None, network: str | None) -> None:
    plan, most = choose(terms, image, network), PLANS.choose(SandboxPolicy(tenant_class=terms.tenant_class))
    if plan is None:
        return
    allowed = {"default": {"default"}, "open": {"default", "python", "node"}, "closed": {"node"}}[terms.tenant_class]
    assert plan.image in allowed.intersection(terms.images if terms.images is not None else allowed)
    assert plan.network == "none" or (most.network == "egress" and terms.network != "none" and network != "none")
    assert plan.workspace_bytes == min(most.workspace_bytes, terms.workspace_bytes or most.workspace_bytes)
    assert plan.workspace_inodes == plan.workspace_bytes // BYTES_PER_INODE
    sizes = {"workspace_bytes": most.workspace_bytes, "workspace_inodes": most.workspace_inodes}
    assert replace(plan, image=most.image, network=most.network, **sizes) == most


@given(any_terms, any_terms, requested_images, requested_networks)
def test_revised_plan_keeps_its_workspace_and_gains_no_network(
    before: SandboxPolicy, after: SandboxPolicy, image: str | None, network: str | None
) -> None:
    plan = choose(before, image, network)
    if plan is None or choose(after) is None:
        return
    revised = PLANS.revise(after, plan)
    assert (revised.workspace_bytes, revised.workspace_inodes) == (plan.workspace_bytes, plan.workspace_inodes)
    assert revised.network == "none" or (plan.network == "egress" and PLANS.network(after) == "egress")
    assert PLANS.revise(after, revised) == revised


def test_unknown_class_is_refused_with_the_list_of_classes() -> None:
    with pytest.raises(ToolFailure, match=r"no tenant class 'far', it has: closed, default, open; give") as refused:
        PLANS.choose(SandboxPolicy(tenant_class="far"))
    assert refused.value.code is ErrorCode.INVALID_ARGUMENTS


def test_tenant_without_the_default_image_gets_its_first_allowed_image() -> None:
    assert PLANS.choose(SandboxPolicy(tenant_class="open", images=("evil", "node", "python"))).image == "node"
    with pytest.raises(ToolFailure, match="no image of the tenant's policy"):
        PLANS.choose(SandboxPolicy(tenant_class="open", images=("evil",)))


@pytest.mark.parametrize("network", ["egress", "everything"])
def test_network_must_be_allowed_by_terms_and_class(network: str) -> None:
    for terms in (
        SandboxPolicy(tenant_class="open", network="none"),
        SandboxPolicy(tenant_class="closed", network="egress"),
    ):
        with pytest.raises(ToolFailure, match="is not allowed for this tenant"):
            PLANS.choose(terms, network=network)
        assert (PLANS.choose(terms).network, PLANS.rules(terms)) == ("none", EgressRules())


def test_removed_class_has_no_egress_rules() -> None:
    assert PLANS.rules(SandboxPolicy(tenant_class="open")).hosts == ("site.example",)
    assert PLANS.rules(SandboxPolicy(tenant_class="gone")) == EgressRules()


@pytest.mark.parametrize("name", ["", "c" * 65])
def test_class_with_an_invalid_name_is_refused_at_startup(name: str) -> None:
    with pytest.raises(ConfigError, match="has an invalid name"):
        load_plans(SandboxdSettings(tenant_classes={name: TenantClass()}))


# Sizes and user by request

GIB = 1024 * MIB
SIZED = build_plans(
    {
        "plain": TenantClass(),
        "ci": TenantClass(
            cpus=2.0,
            largest=LargestOptions(cpus=8, memory_bytes=4 * GIB, workspace_bytes=20 * GIB, pids=4096, user="root"),
        ),
        "root": TenantClass(user="root"),
    }
)


def test_session_gets_requested_sizes_or_those_of_its_class() -> None:
    terms = SandboxPolicy(tenant_class="ci")
    own = SIZED.choose(terms)
    options = SandboxOptions(cpus=0.5, memory_bytes=GIB, workspace_bytes=3 * GIB, pids=1000, user="root")
    plan = SIZED.choose(terms, options=options)
    assert (own.cpus, own.is_root, plan.granted()) == (2.0, False, options)
    limits = limits_of(plan)
    assert (limits.cpus, limits.pids, limits.workspace_bytes) == (0.5, 1000, 3 * GIB)
    assert limits.memory_bytes(has_tmpfs_workspace=False) == GIB
    assert plan.workspace_inodes == 3 * GIB // BYTES_PER_INODE
    # A sandbox of the pool has the sizes of the class.
    assert SIZED.choose(terms, options=SandboxOptions(cpus=2.0)) == own != plan


@pytest.mark.parametrize(
    ("tenant_class", "options"),
    [
        ("ci", SandboxOptions(cpus=8.5)),
        ("ci", SandboxOptions(memory_bytes=4 * GIB + 1)),
        ("ci", SandboxOptions(workspace_bytes=21 * GIB)),
        ("ci", SandboxOptions(pids=4097)),
        ("plain", SandboxOptions(pids=257)),
        ("plain", SandboxOptions(user="root")),
    ],
)
def test_options_above_the_class_limit_are_refused_with_the_limit(tenant_class: str, options: SandboxOptions) -> None:
    with pytest.raises(ToolFailure) as refused:
        SIZED.choose(SandboxPolicy(tenant_class=tenant_class), options=options)
    (name,) = options.model_dump()
    limit = {"cpus": "8", "memory_bytes": str(4 * GIB), "workspace_bytes": str(20 * GIB), "user": ""}.get(name, "")
    assert refused.value.code is ErrorCode.INVALID_ARGUMENTS
    assert f"class '{tenant_class}'" in str(refused.value)
    assert limit in str(refused.value)


def test_tenant_policy_limits_the_requested_workspace() -> None:
    terms = SandboxPolicy(tenant_class="ci", workspace_bytes=2 * GIB)
    assert SIZED.choose(terms, options=SandboxOptions(workspace_bytes=2 * GIB)).workspace_bytes == 2 * GIB
    with pytest.raises(ToolFailure, match=f"at most {2 * GIB} for this tenant"):
        SIZED.choose(terms, options=SandboxOptions(workspace_bytes=3 * GIB))
    small = SandboxPolicy(tenant_class="ci", workspace_bytes=MIB)
    assert SIZED.choose(small, options=SandboxOptions(cpus=4)).workspace_bytes == MIB


def test_root_class_allows_the_sandbox_user_on_request() -> None:
    terms = SandboxPolicy(tenant_class="root")
    assert SIZED.choose(terms).is_root
    assert not SIZED.choose(terms, options=SandboxOptions(user="sandbox")).is_root


def test_next_sandbox_keeps_its_sizes_up_to_the_class_limit() -> None:
    terms = SandboxPolicy(tenant_class="ci")
    plan = SIZED.choose(terms, options=SandboxOptions(cpus=6, pids=1000, user="root"))
    assert SIZED.revise(terms, plan) == plan
    lowered = build_plans({"ci": TenantClass(memory_reserve_bytes=GIB, largest=LargestOptions(cpus=4, user="root"))})
    revised = lowered.revise(terms, plan)
    assert (revised.cpus, revised.pids, revised.memory_reserve_bytes, revised.is_root) == (4, 256, GIB, True)
    with pytest.raises(ToolFailure, match="no longer run as root"):
        build_plans({"ci": TenantClass()}).revise(terms, plan)


async def test_call_timeout_is_limited_by_the_class(tmp_path: Path) -> None:
    plans = build_plans({"default": TenantClass(largest=LargestOptions(timeout_s=7_200)), "plain": TenantClass()})
    async with running_sandboxd(tmp_path, plans=plans) as daemon:
        client, name = await daemon.open()
        assert (await call(client, name, {**EXEC, "timeout_s": 7_200}, body=b"done")).streams == {"stdout": b"done"}
        for tenant_class, most in (("default", 7_200), ("plain", 600)):
            client, name = await daemon.open(tenant_class, policy=SandboxPolicy(tenant_class=tenant_class))
            with pytest.raises(ToolFailure, match=f"class '{tenant_class}' may run {most} s at most") as refused:
                await call(client, name, {**EXEC, "timeout_s": most + 1})
            assert refused.value.code is ErrorCode.INVALID_ARGUMENTS


# Patterns of images

PATTERNS = build_plans(
    {
        "wide": TenantClass(images=("ghcr.io/team/*", "docker.io/library/node:*", "python:3")),
        "pinned": TenantClass(images=("ghcr.io/team/*@sha256:*",)),
    }
)
TEAM, DIGEST = "ghcr.io/team/tool:v1", f"sha256:{'0' * 64}"


@pytest.mark.parametrize(
    ("requested", "image"),
    [
        (TEAM, TEAM),
        ("docker.io/library/node:20", "node:20"),
        ("docker.io/library/python:3", "python:3"),
        ("default:latest", "default"),
        (f"{TEAM}@{DIGEST}", f"ghcr.io/team/tool@{DIGEST}"),
    ],
)
def test_image_that_matches_a_class_pattern_is_allowed(requested: str, image: str) -> None:
    plan = PATTERNS.choose(SandboxPolicy(tenant_class="wide"), requested)
    assert (plan.image, plan.tenant_class, plan.image_id) == (image, "wide", None)


@pytest.mark.parametrize(
    ("tenant_class", "images", "requested"),
    [
        ("wide", None, "ghcr.io/other/tool"),
        ("wide", None, DIGEST),
        ("wide", ("ghcr.io/team/tool:*",), "ghcr.io/team/other"),
        ("wide", ("ghcr.io/*",), "ghcr.io/other/tool"),
        ("wide", ("docker.io/*",), TEAM),
        ("pinned", None, TEAM),
        ("default", None, TEAM),
    ],
)
def test_image_must_match_class_and_terms(tenant_class: str, images: tuple[str, ...] | None, requested: str) -> None:
    with pytest.raises(ToolFailure, match="is not allowed on this host: use one of "):
        PATTERNS.choose(SandboxPolicy(tenant_class=tenant_class, images=images), requested)


@pytest.mark.parametrize(
    ("image", "is_pulled"), [(TEAM, True), ("node:20", True), ("python:3", False), ("default", False)]
)
def test_only_a_pattern_with_a_registry_allows_a_pull(image: str, is_pulled: bool) -> None:
    assert PATTERNS.may_pull(PATTERNS.choose(SandboxPolicy(tenant_class="wide"), image)) == is_pulled
    assert not PATTERNS.may_pull(replace(PATTERNS.standard(), image=image))


def test_revised_plan_keeps_the_content_id_of_its_image() -> None:
    terms = SandboxPolicy(tenant_class="wide")
    plan = replace(PATTERNS.choose(terms, TEAM), image_id=DIGEST)
    assert PATTERNS.revise(terms, plan).image_id == DIGEST
    revised = PATTERNS.revise(SandboxPolicy(tenant_class="pinned"), plan)
    assert (revised.image, revised.image_id) == ("default", None)


def test_equivalent_image_names_share_a_warm_pool() -> None:
    plans = build_plans({"wide": TenantClass(images=("docker.io/library/node",), pool={"node:latest": 2})})
    (pooled,) = [plan for plan in plans.pooled() if "node" in plan.image]
    assert plans.choose(SandboxPolicy(tenant_class="wide"), "node") == pooled


@pytest.mark.parametrize("images", [("*",), ("team/*",), ("Debian",), ("a" * 257,)])
def test_malformed_image_pattern_is_refused_everywhere(images: tuple[str, ...]) -> None:
    for build in (
        lambda: SandboxPolicy(images=images),
        lambda: TenantClass(images=images),
        lambda: SandboxdSettings(sandbox_images_allowed=list(images)),
    ):
        with pytest.raises(ValidationError, match="image"):
            build()


def test_too_many_image_names_for_a_report_are_refused() -> None:
    names = tuple(f"registry.example/team/{number:0200}" for number in range(200))
    with pytest.raises(ConfigError, match="use patterns"):
        load_plans(SandboxdSettings(tenant_classes={"many": TenantClass(images=names)}))


# Open sessions


class FakeTunnels:
    """The open connections of a sandbox to the proxy."""

    def __init__(self) -> None:
        self.cuts = 0

    def take(self, frame: object) -> None: ...

    def cut(self) -> None:
        self.cuts += 1

    def close(self) -> None: ...


async def prepare_network(entry: HostSession, sandbox: Sandbox) -> None:
    sandbox.tunnels = FakeTunnels()


OPEN = SandboxPolicy(tenant_class="open")


def tunnels_of(entry: HostSession | None) -> FakeTunnels:
    assert isinstance(entry.sandbox.tunnels, FakeTunnels)
    return entry.sandbox.tunnels


async def test_terms_can_be_set_for_all_sessions_of_a_tenant(tmp_path: Path) -> None:
    async with running_sandboxd(tmp_path, plans=PLANS, prepare_network=prepare_network) as daemon:
        for session in ("s1", "s2"):
            client, _ = await daemon.open(session, policy=OPEN)
        await asyncio.to_thread(client.open, "umbrella", "s1", policy=OPEN)
        assert await asyncio.to_thread(client.send_policy, "acme", SandboxPolicy()) == 2
        cuts = {name: tunnels_of(daemon.sessions.find(name)).cuts for name in ("acme:s1", "acme:s2", "umbrella:s1")}
        assert cuts == {"acme:s1": 1, "acme:s2": 1, "umbrella:s1": 0}


async def test_repeated_open_without_terms_keeps_the_terms(tmp_path: Path) -> None:
    narrow = OPEN.model_copy(update={"network": "none"})
    async with running_sandboxd(tmp_path, plans=PLANS) as daemon:
        client, name = await daemon.open(policy=narrow)
        await asyncio.to_thread(client.open, "acme", "s1")
        entry = daemon.session(name)
        assert entry.policy == narrow


async def test_next_sandbox_uses_the_current_class_of_its_tenant(tmp_path: Path) -> None:
    async with open_host(tmp_path, plans=PLANS, workspaces=MemoryWorkspaces()) as host:
        plan = PLANS.choose(OPEN.model_copy(update={"workspace_bytes": 5 * MIB}))
        entry = await host.sessions.open("acme:s", SessionParameters(plan, 60, policy=OPEN))
        assert await host.sessions.suspender.give_up(entry, must_be_idle=False)
        await host.sessions.use("acme:s", "c", SandboxPolicy(tenant_class="closed"))
        config = host.engine.guests[-1].config
        assert config["HostConfig"]["Runtime"] == "runsc"
        assert config["HostConfig"]["PidsLimit"] == 32
        assert config["Image"] == "node"
        assert (entry.plan.network, entry.plan.workspace_bytes) == ("none", 5 * MIB)


async def test_session_with_a_removed_class_gets_no_sandbox_and_keeps_its_files(tmp_path: Path) -> None:
    async with open_host(tmp_path, plans=PLANS, workspaces=MemoryWorkspaces()) as host:
        entry = await host.sessions.open("acme:s", SessionParameters(PLAN, 60))
        assert await host.sessions.suspender.give_up(entry, must_be_idle=False)
        with pytest.raises(
            SandboxUnavailable,
            match=r"cannot get another sandbox \(this host has no tenant class 'gone'.* it has: closed",
        ):
            await host.sessions.use("acme:s", "c", SandboxPolicy(tenant_class="gone"))
        assert host.factory.slots.used == 0
        await host.sessions.use("acme:s", "c", SandboxPolicy())
        assert len(host.suspension_store.unpacked) == 1


async def test_terms_are_kept_across_a_sandboxd_restart(tmp_path: Path) -> None:
    workspaces = MemoryWorkspaces()
    first = build_host(tmp_path, plans=PLANS, workspaces=workspaces)
    await first.sessions.open("acme:s", SessionParameters(PLANS.choose(OPEN), 60, policy=OPEN))
    await first.sessions.use("acme:s", "c", SandboxPolicy(tenant_class="closed", images=("node",)))
    first.lease.give_back()
    async with open_host(tmp_path, plans=PLANS, workspaces=workspaces) as second:
        assert second.sessions.adopt() == 1
        await second.sessions.use("acme:s", "c")
        assert second.engine.guests[0].config["HostConfig"]["Runtime"] == "runsc"
    await first.engine.end()


@pytest.mark.parametrize(
    "terms",
    [
        "default",
        [],
        {"tenant_class": ""},
        {"network": "host"},
        {"workspace_bytes": 1},
        {"runtime": "runc"},
        {"images": "python"},
        {"images": [1]},
    ],
    ids=str,
)
async def test_invalid_terms_are_refused_and_open_nothing(tmp_path: Path, terms: Any) -> None:
    async with running_sandboxd(tmp_path, plans=PLANS) as daemon:
        for verb in ("open", "call", "policy"):
            header = {"verb": verb, "tenant": "acme", "sandbox": "acme:s", "request": {"op": "ping"}, "policy": terms}
            [refused] = await raw_exchange(daemon.path, frame(header))
            assert (refused["code"], "fix the tenant's policy" in refused["message"]) == ("INVALID_ARGUMENTS", True)
        assert daemon.engine.guests == []


TOKEN: dict[str, Any] = {"value": "canary-value-1", "hosts": ["site.example"], "place": "basic"}
ALLOWED = OPEN.model_copy(update={"secrets": ("TOKEN", "OTHER")})


async def exchange(daemon: Sandboxd, values: dict[str, Any]) -> dict[str, Any]:
    return await asyncio.to_thread(daemon.client().exchange_secrets, values)


async def test_session_gets_secret_placeholders_and_authorities_but_no_values(tmp_path: Path) -> None:
    async with running_sandboxd(tmp_path, plans=PLANS, prepare_network=prepare_network) as daemon:
        await daemon.open("s1", policy=ALLOWED, options=SandboxOptions(secrets=("TOKEN",)))
        await daemon.open("s2", policy=ALLOWED)
        assert (await exchange(daemon, {"acme": {"TOKEN": TOKEN}}))["used"] == {"acme": ["TOKEN"]}
        first, second = (guest.variables for guest in daemon.engine.guests[-2:])
        assert (first["TOKEN"], first["SSL_CERT_FILE"]) == (build_placeholder("acme", "s1", "TOKEN"), AUTHORITIES)
        assert not {"TOKEN", "SSL_CERT_FILE"} & second.keys()
        state = await asyncio.to_thread(
            lambda: b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
        )
        assert b"canary-value" not in state + json.dumps([first, second]).encode()


@pytest.mark.parametrize(
    ("terms", "secret"),
    [
        (ALLOWED, "THIRD"),
        (ALLOWED.model_copy(update={"network": "none"}), "TOKEN"),
        (OPEN.model_copy(update={"secrets": ()}), "TOKEN"),
        (OPEN, "LD_PRELOAD"),
        (OPEN, "PATH"),
    ],
    ids=repr,
)
async def test_secret_forbidden_by_policy_network_or_name_is_refused(
    terms: SandboxPolicy, secret: str, tmp_path: Path
) -> None:
    async with running_sandboxd(tmp_path, plans=PLANS, prepare_network=prepare_network) as daemon:
        with pytest.raises(ToolFailure) as refused:
            await daemon.open("s1", policy=terms, options=SandboxOptions.model_construct(secrets=(secret,)))
        assert refused.value.code is ErrorCode.INVALID_ARGUMENTS
        assert len(daemon.sessions) == 0


async def test_secret_change_cuts_only_connections_of_sessions_that_use_it(tmp_path: Path) -> None:
    async with running_sandboxd(tmp_path, plans=PLANS, prepare_network=prepare_network) as daemon:
        for session, names in (("s1", ("TOKEN",)), ("s2", ("OTHER",)), ("s3", ())):
            await daemon.open(session, policy=ALLOWED, options=SandboxOptions(secrets=names))
        both = {"acme": {"TOKEN": TOKEN, "OTHER": TOKEN}}
        for values, cuts in (
            (both, [0, 0, 0]),
            (both, [0, 0, 0]),
            ({"acme": {"TOKEN": {**TOKEN, "value": "canary-value-2"}, "OTHER": TOKEN}}, [1, 0, 0]),
            ({"acme": {"TOKEN": None, "OTHER": TOKEN}}, [2, 0, 0]),
            ({}, [2, 1, 0]),
        ):
            await exchange(daemon, values)
            assert [tunnels_of(daemon.sessions.find(f"acme:s{n}")).cuts for n in (1, 2, 3)] == cuts


async def test_secret_values_wait_for_the_worker_and_expire_with_its_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LEASE_S", 0.1)
    monkeypatch.setattr(module, "WAIT_S", 0.3)
    changes: list[set[tuple[str, str]]] = []
    ended = asyncio.Event()

    def note(changed: set[tuple[str, str]]) -> None:
        changes.append(changed)
        ended.set()

    values = module.SecretValues(note)
    waiting = asyncio.ensure_future(values.wait("acme", ["TOKEN", "GONE"]))
    await asyncio.sleep(0)
    values.replace({"acme": {"TOKEN": TOKEN, "GONE": None}})
    assert await waiting == [{"name": "TOKEN", **TOKEN}]
    assert await values.wait("acme", []) == []
    await asyncio.wait_for(ended.wait(), SOON_S)
    assert changes == [{("acme", "TOKEN")}]
    with pytest.raises(OSError, match="sends no secrets"):
        await values.wait("acme", ["TOKEN"])


async def test_authority_of_a_restarted_proxy_is_written_once(tmp_path: Path) -> None:
    written: list[bytes] = []

    async def place(bundle: bytes) -> None:
        written.append(bundle)

    at = tmp_path / "egress.sock"
    authority = module.ProxyAuthority(at, frozenset({os.geteuid()}), place)
    with pytest.raises(SandboxUnavailable):
        await authority.require()
    with open_harness() as first, open_harness() as second:
        for harness in (first, second):
            at.unlink(missing_ok=True)
            at.symlink_to(harness.path)
            await authority.require()
            await authority.refresh()
        assert written == [ask_proxy(harness, "authority") for harness in (first, second)]
        assert written[0] != written[1]
