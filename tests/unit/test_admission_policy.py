"""The choice of the next call that gets a slot: shares, caps, rates, and the limit on long calls of one tenant. Steps
of the script run at given instants.
"""

from collections import Counter
from collections.abc import Iterator

import pytest

from contract.tenancy import TenantPolicy
from store.slots import enqueue, tick
from tests.admission_ground import QUEUE, Ground, build_request, set_slots
from tests.conftest import RedisProcess


@pytest.fixture
def ground(redis_server: RedisProcess) -> Iterator[Ground]:
    with redis_server.client() as client:
        set_slots(client, 4)
        yield Ground(client)


def tenants(ground: Ground) -> Counter[str]:
    return Counter(call["tenant"] for call in ground.kept("held").values())


def play(
    ground: Ground,
    policies: dict[str, TenantPolicy],
    durations: dict[str, float],
    *,
    for_s: float,
    callers: dict[str, int] | None = None,
) -> Counter[str]:
    """Seconds of four workers that each tenant got in that time; each has so many callers, who ask anew when their call
    has ended.

    Workers take calls in the order in which they were granted. Afterwards all is given back.
    """
    owner = {
        ground.ask(tenant, policy=policy): tenant
        for tenant, policy in policies.items()
        for _ in range((callers or {}).get(tenant, 12))
    }
    used: Counter[str] = Counter()
    running: list[tuple[float, str]] = []
    taken: set[str] = set()
    until = ground.now + for_s
    while ground.now < until:
        for call in [call for call in ground.held if call not in taken][: 4 - len(running)]:
            taken.add(call)
            running.append((ground.now + durations[owner[call]], call))
        running.sort()
        ground.now, call = running.pop(0)
        tenant = owner[call]
        used[tenant] += durations[tenant]
        ground.end(call, durations[tenant])
        owner[ground.ask(tenant, policy=policies[tenant])] = tenant
    for call in [*ground.kept("waiting"), *ground.held]:
        ground.end(call, 0.0)
    return used


def share(used: Counter[str], tenant: str) -> float:
    return used[tenant] / sum(used.values())


@pytest.mark.parametrize(
    ("slots", "seconds", "held"), [(4, 0.1, 6), (4, 0.01, 8), (1, 0.1, 2), (1, 0.01, 5), (16, 0.1, 24), (16, 0.01, 32)]
)
def test_a_queue_has_the_next_calls_ready_and_more_of_those_that_are_over_in_a_moment(
    ground: Ground, slots: int, seconds: float, held: int
) -> None:
    set_slots(ground.client, slots)
    ground.learn("acme", seconds)
    for _ in range(40):
        ground.ask()
    assert len(ground.kept("held")) == held


def test_calls_that_are_over_in_a_moment_take_no_share_from_others_by_going_beyond_the_capacity(ground: Ground) -> None:
    used = play(
        ground,
        {"quick": TenantPolicy(), "slow": TenantPolicy()},
        {"quick": 0.02, "slow": 0.4},
        for_s=15,
        callers={"quick": 40},
    )
    assert share(used, "slow") == pytest.approx(0.5, rel=0.1)


def test_a_queue_without_known_workers_lets_a_few_pass_to_learn_that_its_host_is_lost(ground: Ground) -> None:
    set_slots(ground.client, None)
    ground.learn("acme", 0.01)
    for _ in range(20):
        ground.ask()
    assert len(ground.kept("held")) == 4


def test_more_slots_are_given_out_when_more_workers_report_of_themselves(ground: Ground) -> None:
    for _ in range(20):
        ground.ask()
    before = len(ground.kept("held"))
    set_slots(ground.client, 10)
    ground.step(tick([QUEUE]))
    assert (before, len(ground.kept("held"))) == (3, 9)


def test_seconds_are_shared_out_by_weight(ground: Ground) -> None:
    used = play(
        ground, {"heavy": TenantPolicy(weight=3), "light": TenantPolicy()}, {"heavy": 0.5, "light": 0.5}, for_s=40
    )
    assert share(used, "heavy") == pytest.approx(0.75, rel=0.05)


def test_seconds_are_shared_out_and_not_calls(ground: Ground) -> None:
    used = play(ground, {"quick": TenantPolicy(), "slow": TenantPolicy()}, {"quick": 0.25, "slow": 0.75}, for_s=30)
    assert share(used, "quick") == pytest.approx(0.5, rel=0.05)


def test_a_tenant_that_was_away_has_saved_nothing_up(ground: Ground) -> None:
    seconds = {"stayed": 0.25, "came": 0.25}
    play(ground, {"stayed": TenantPolicy()}, seconds, for_s=15)
    used = play(ground, {"stayed": TenantPolicy(), "came": TenantPolicy()}, seconds, for_s=10)
    assert share(used, "came") == pytest.approx(0.5, rel=0.1)


def test_a_tenant_that_comes_and_goes_with_every_call_gets_no_more_than_its_share(ground: Ground) -> None:
    """The tenant rarely has a waiting call when one of its calls ends. The script must still remember the tenant's
    use.
    """
    policies = {"heavy": TenantPolicy(weight=9), "fleeting": TenantPolicy()}
    used = play(ground, policies, {"heavy": 0.4, "fleeting": 0.4}, for_s=30, callers={"heavy": 24, "fleeting": 2})
    assert share(used, "fleeting") == pytest.approx(0.1, abs=0.03)


def test_calls_of_a_tenant_go_in_the_order_in_which_they_came(ground: Ground) -> None:
    ground.learn("acme", 0.1)
    asked = [ground.ask() for _ in range(12)]
    while ground.held != asked[-6:]:
        ground.end(ground.held[0])
    assert ground.held == asked[-6:]


def test_interactive_calls_go_before_a_batch_which_is_not_starved(ground: Ground) -> None:
    set_slots(ground.client, 1)
    ground.learn("acme", 0.1)
    batch = [ground.ask(priority="batch") for _ in range(4)]
    interactive = [ground.ask() for _ in range(20)]
    order = []
    while ground.held:
        order.append(ground.held[0])
        ground.end(ground.held[0])
    assert order[:2] == batch[:2]
    assert order[2:11] == [*interactive[:7], batch[2], interactive[7]]
    assert len(order) == 24


def test_long_calls_of_one_tenant_leave_a_slot_to_others(ground: Ground) -> None:
    for _ in range(20):
        ground.ask("hog", limit_s=60.0)
    assert tenants(ground) == {"hog": 3}
    ground.ask("other")
    assert tenants(ground) == {"hog": 3, "other": 1}


def test_long_calls_of_all_tenants_leave_the_broker_s_queue_to_short_ones(ground: Ground) -> None:
    ground.learn("quick", 0.01)
    for _ in range(5):
        ground.ask("hog")
        ground.ask("bear")
    assert sum(tenants(ground).values()) == 4
    ground.ask("quick")
    assert tenants(ground)["quick"] == 1


def test_short_calls_pass_the_long_ones_of_their_own_tenant_that_may_not_go(ground: Ground) -> None:
    ground.learn("acme", 0.01, tool="read_tool")
    for _ in range(10):
        ground.ask(tool="bash_tool")
    ground.ask(tool="read_tool")
    assert Counter(call["tool"] for call in ground.kept("held").values()) == {"bash_tool": 3, "read_tool": 1}


def test_a_tenant_whose_calls_turn_out_long_gets_no_more_of_them(ground: Ground) -> None:
    ground.learn("hog", 0.01)
    first = ground.ask("hog")
    second = ground.ask("hog")
    ground.now += 1.5
    for _ in range(10):
        ground.ask("hog")
    assert tenants(ground) == {"hog": 3}
    ground.end(first, 1.5)
    ground.end(second, 1.5)
    assert tenants(ground) == {"hog": 3}


def test_a_cap_holds_over_all_queues_and_wakes_what_waits_in_another(ground: Ground) -> None:
    policy = TenantPolicy(in_flight=2)
    set_slots(ground.client, 4, "host.b.1")
    here = [ground.ask(policy=policy) for _ in range(2)]
    there = ground.ask(policy=policy, queue="host.b.1")
    assert there not in ground.held
    ground.end(here[0])
    assert there in ground.held


def test_a_higher_cap_holds_from_the_next_request_on(ground: Ground) -> None:
    waiting = [ground.ask(policy=TenantPolicy(in_flight=1)) for _ in range(3)]
    ground.ask(policy=TenantPolicy(in_flight=3))
    assert ground.held == waiting


def test_calls_begin_no_faster_than_the_tenants_rate(ground: Ground) -> None:
    policy = TenantPolicy(rate_per_s=2, burst=2)
    set_slots(ground.client, 100)
    for _ in range(10):
        ground.ask(policy=policy)
    assert len(ground.held) == 2
    answer = ground.step(tick([]))
    assert answer.wake_s == pytest.approx(0.5)
    for seconds in range(1, 4):
        ground.now += 1
        ground.step(tick([]))
        assert len(ground.held) == 2 + 2 * seconds


def test_who_has_too_many_calls_waiting_is_refused_and_reported_when_to_try_again(ground: Ground) -> None:
    policy = TenantPolicy(queued=2)
    for _ in range(5):
        ground.ask(policy=policy)
    answer = ground.step(enqueue("o1.more", build_request(policy=policy)))
    assert list(answer.refused) == ["o1.more"]
    assert 0.1 <= answer.refused["o1.more"] <= 60
    assert len(ground.kept("waiting")) == 2


def test_an_urgent_call_passes_everything_and_counts(ground: Ground) -> None:
    policy = TenantPolicy(in_flight=1, queued=1)
    ground.ask(policy=policy)
    ground.ask(policy=policy)
    urgent = ground.ask(policy=policy, is_urgent=True)
    assert urgent in ground.held
    assert ground.numbers()[f"queue:{QUEUE}"]["held"] == 2


def test_a_call_that_did_not_run_costs_nothing_and_teaches_nothing(ground: Ground) -> None:
    call = ground.ask()
    ground.now += 20
    ground.end(call, 0.0)
    assert ground.numbers()[f"pair:{QUEUE}|acme"]["used"] == 0
    assert not ground.client.exists("toolcrew:d:admission:estimates:acme")


def test_nothing_is_left_of_who_has_gone(ground: Ground) -> None:
    """Only sums remain, and they expire by themselves."""
    policy = TenantPolicy(in_flight=2, rate_per_s=5, burst=1)
    calls = [
        ground.ask(tenant, queue=queue, policy=policy)
        for tenant in ("a", "b")
        for queue in (QUEUE, "host.b.1")
        for _ in range(5)
    ]
    for call in calls:
        ground.now += 0.3
        ground.end(call, 0.2)
    ground.now += 5
    ground.step(tick([]))
    lasting = [key for key in ground.client.scan_iter("toolcrew:d:admission:*") if ground.client.ttl(key) == -1]
    assert lasting == [b"toolcrew:d:admission:clock"]
