"""Sessions whose time to live expired on a host lose their location and do not count. Sessions that ended otherwise
keep their location.
"""

import pytest

from tests.conftest import RedisProcess
from tests.support.sandboxd.fake_host import DEPLOYMENT, HostHarness, MemorySandboxd
from toolcrew.contract.errors import BrokerUnavailable
from toolcrew.contract.names import location_key, tenant_sessions_key
from toolcrew.workers.host_duties import ExpiryMonitor

NAMES = tenant_sessions_key(DEPLOYMENT, "acme")


class Host:
    """A host that is checked one round at a time."""

    def __init__(self, harness: HostHarness) -> None:
        self.harness = harness
        self.sandboxd = MemorySandboxd()
        self.sessions = harness.sessions()
        self.watch = ExpiryMonitor(self.sessions)

    def add(self, session: str, *, idle_s: float, ttl_s: float, **fields: object) -> None:
        self.sandboxd.add(f"acme:{session}", idle_s=idle_s, ttl_s=ttl_s)
        self.harness.put_location(f"acme:{session}", ttl_s=ttl_s, **fields)
        self.harness.redis.sadd(NAMES, session)

    def check_once(self) -> int:
        with self.sandboxd.client() as client:
            return self.watch.run_round(client)

    def has_location(self, session: str) -> bool:
        return bool(self.harness.redis.exists(location_key(DEPLOYMENT, "acme", session)))


@pytest.fixture
def host(redis_server: RedisProcess) -> Host:
    return Host(HostHarness(redis_server))


def test_only_an_expired_session_loses_its_location(host: Host) -> None:
    host.add("old", idle_s=60.0, ttl_s=60.0)
    host.add("lost", idle_s=5.0, ttl_s=600.0)
    host.add("moved", idle_s=60.0, ttl_s=60.0, queue="host.b.b1")
    host.add("moving", idle_s=60.0, ttl_s=60.0, state="moving")
    assert host.check_once() == 0, "they are still there"
    host.sandboxd.rows.clear()
    assert (host.check_once(), host.check_once()) == (1, 0)
    assert {name: host.has_location(name) for name in ("old", "lost", "moved", "moving")} == {
        "old": False,
        "lost": True,
        "moved": True,
        "moving": True,
    }
    assert host.harness.redis.smembers(NAMES) == {b"lost", b"moved", b"moving"}


def test_the_lifetime_in_the_location_decides(host: Host) -> None:
    """A client has changed it after the host was last asked for its sessions."""
    host.add("shorter", idle_s=60.0, ttl_s=600.0)
    host.add("longer", idle_s=60.0, ttl_s=60.0)
    host.check_once()
    for session, ttl_s in (("shorter", 60), ("longer", 600)):
        host.harness.redis.hset(location_key(DEPLOYMENT, "acme", session), "ttl_s", ttl_s)
    host.sandboxd.rows.clear()
    assert host.check_once() == 1
    assert (host.has_location("shorter"), host.has_location("longer")) == (False, True)


def test_an_expiry_that_could_not_be_stored_is_stored_later(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host.add("old", idle_s=60.0, ttl_s=60.0)
    host.check_once()
    host.sandboxd.rows.clear()

    def fail(_: object) -> int:
        raise BrokerUnavailable("away")

    with monkeypatch.context() as patch:
        patch.setattr(host.sessions, "forget", fail)
        with pytest.raises(BrokerUnavailable):
            host.check_once()
    assert host.check_once() == 1
    assert not host.has_location("old")
