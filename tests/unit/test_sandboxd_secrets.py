"""sandboxd gives a session placeholders, passes values on only while the worker confirms them, and cuts connections
when a value changes.
"""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from contract.errors import ErrorCode, SandboxUnavailable, ToolFailure
from contract.sandboxes import SandboxOptions
from contract.secrets import build_placeholder
from contract.tenancy import SandboxTerms
from tests.egress_harness import open_harness
from tests.fake_sandboxd import Sandboxd, running_sandboxd
from tests.secret_harness import ask_proxy
from tests.unit.test_sandboxd_terms import OPEN, PLANS, prepare_network, standing
from workers.sandboxd.egress import secrets as module
from workers.sandboxd.runtime.hardening import AUTHORITIES

TOKEN: dict[str, Any] = {"value": "canary-value-1", "hosts": ["site.example"], "place": "basic"}
ALLOWED = OPEN.model_copy(update={"secrets": ("TOKEN", "OTHER")})


def read_files(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


async def exchange(daemon: Sandboxd, values: dict[str, Any]) -> dict[str, Any]:
    return await asyncio.to_thread(daemon.client().exchange_secrets, values)


async def test_a_session_gets_placeholders_and_the_authorities_and_no_value(tmp_path: Path) -> None:
    async with running_sandboxd(tmp_path, plans=PLANS, prepare_network=prepare_network) as daemon:
        await daemon.open("s1", terms=ALLOWED, options=SandboxOptions(secrets=("TOKEN",)))
        await daemon.open("s2", terms=ALLOWED)
        assert (await exchange(daemon, {"acme": {"TOKEN": TOKEN}}))["used"] == {"acme": ["TOKEN"]}
        first, second = (guest.variables for guest in daemon.engine.guests[-2:])
        assert (first["TOKEN"], first["SSL_CERT_FILE"]) == (build_placeholder("acme", "s1", "TOKEN"), AUTHORITIES)
        assert not {"TOKEN", "SSL_CERT_FILE"} & second.keys()
        state = await asyncio.to_thread(read_files, tmp_path)
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
async def test_a_secret_that_policy_network_or_name_forbids_is_refused(
    terms: SandboxTerms, secret: str, tmp_path: Path
) -> None:
    async with running_sandboxd(tmp_path, plans=PLANS, prepare_network=prepare_network) as daemon:
        with pytest.raises(ToolFailure) as refused:
            await daemon.open("s1", terms=terms, options=SandboxOptions.model_construct(secrets=(secret,)))
        assert refused.value.code is ErrorCode.INVALID_ARGUMENTS
        assert len(daemon.sessions) == 0


async def test_a_change_cuts_the_sessions_that_use_the_secret_and_no_others(tmp_path: Path) -> None:
    async with running_sandboxd(tmp_path, plans=PLANS, prepare_network=prepare_network) as daemon:
        for session, names in (("s1", ("TOKEN",)), ("s2", ("OTHER",)), ("s3", ())):
            await daemon.open(session, terms=ALLOWED, options=SandboxOptions(secrets=names))
        both = {"acme": {"TOKEN": TOKEN, "OTHER": TOKEN}}
        for values, cuts in (
            (both, [0, 0, 0]),
            (both, [0, 0, 0]),
            ({"acme": {"TOKEN": {**TOKEN, "value": "canary-value-2"}, "OTHER": TOKEN}}, [1, 0, 0]),
            ({"acme": {"TOKEN": None, "OTHER": TOKEN}}, [2, 0, 0]),
            ({}, [2, 1, 0]),
        ):
            await exchange(daemon, values)
            assert [standing(daemon.sessions.find(f"acme:s{n}")).cuts for n in (1, 2, 3)] == cuts


async def test_values_wait_for_the_worker_and_end_with_its_lease(
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
    await asyncio.wait_for(ended.wait(), 5)
    assert changes == [{("acme", "TOKEN")}]
    with pytest.raises(OSError, match="sends no secrets"):
        await values.wait("acme", ["TOKEN"])


async def test_the_authority_of_a_proxy_that_started_again_is_written_once(tmp_path: Path) -> None:
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
