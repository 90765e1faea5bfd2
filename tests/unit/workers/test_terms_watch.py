"""Updates about tenants that sandboxd receives between their calls."""

import pytest

from toolcrew.contract.errors import BrokerUnavailable, ErrorCode, ToolFailure
from toolcrew.contract.tenancy import SandboxPolicy, TenantPolicy
from toolcrew.workers.host_duties import PolicyMonitor
from toolcrew.workers.sandbox_client import SandboxClient

OPEN, CLOSED = SandboxPolicy(tenant_class="open"), SandboxPolicy(tenant_class="open", network="none")


class Host(SandboxClient):
    """A sandboxd with sessions of these tenants. `sent_terms` lists the updates in order."""

    def __init__(self, *tenants: str) -> None:
        super().__init__("/nonexistent")
        self.tenants = list(tenants)
        self.sent_policies: list[tuple[str, SandboxPolicy]] = []

    def sessions(self) -> list[dict[str, object]]:
        return [{"name": f"{tenant}:{number}"} for tenant in self.tenants for number in range(2)]

    def send_policy(self, tenant: str, policy: SandboxPolicy) -> int:
        self.sent_policies.append((tenant, policy))
        return 2


class PolicySource(dict[str, SandboxPolicy | Exception]):
    """Terms by tenant, or the exception that a request for the terms raises."""

    def policy(self, tenant: str) -> TenantPolicy:
        policy = self[tenant]
        if isinstance(policy, Exception):
            raise policy
        return TenantPolicy(sandbox=policy)


@pytest.fixture
def host() -> Host:
    return Host("acme", "umbrella")


@pytest.fixture
def policies() -> PolicySource:
    return PolicySource(acme=OPEN, umbrella=OPEN)


@pytest.fixture
def watch(host: Host, policies: PolicySource) -> PolicyMonitor:
    return PolicyMonitor(policies.policy)


def test_terms_are_sent_once_per_change(watch: PolicyMonitor, host: Host, policies: PolicySource) -> None:
    assert (watch.run_round(host), watch.run_round(host)) == (2, 0)
    policies["acme"] = CLOSED
    assert watch.run_round(host) == 1
    assert host.sent_policies == [("acme", OPEN), ("umbrella", OPEN), ("acme", CLOSED)]


def test_removed_tenant_loses_its_network(watch: PolicyMonitor, host: Host, policies: PolicySource) -> None:
    watch.run_round(host)
    policies["acme"] = ToolFailure(ErrorCode.UNKNOWN_TENANT, "no such tenant")
    assert (watch.run_round(host), watch.run_round(host)) == (1, 0)
    assert host.sent_policies[-1] == ("acme", CLOSED)


def test_sandboxd_keeps_the_last_terms_during_an_outage(
    watch: PolicyMonitor, host: Host, policies: PolicySource
) -> None:
    watch.run_round(host)
    policies["acme"], policies["umbrella"] = BrokerUnavailable("Redis is away"), CLOSED
    assert (watch.run_round(host), host.sent_policies[-1]) == (1, ("umbrella", CLOSED))


def test_terms_of_a_returning_tenant_are_sent_again(watch: PolicyMonitor, host: Host) -> None:
    watch.run_round(host)
    host.tenants = ["umbrella"]
    watch.run_round(host)
    host.tenants = ["acme", "umbrella"]
    assert (watch.run_round(host), host.sent_policies[-1]) == (1, ("acme", OPEN))
