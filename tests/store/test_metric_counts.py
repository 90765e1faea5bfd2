"""A process's counts reach the deployment's sums once, even if replies are lost, a process restarts or another client
writes to the same keys.
"""

import math
from collections.abc import Iterator

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import RedisProcess
from toolcrew.contract.metrics import (
    CALL_SECONDS,
    COUNT,
    OTHER,
    SANDBOX_OOM,
    SUM,
    TOKENS,
    Metric,
    clean_label,
    encode_series,
    parse_field,
)
from toolcrew.store.metrics import ABSORB, Counts, absorb_values, counted_key, metrics_key

SUMS = metrics_key("d")


@pytest.fixture
def client(redis_server: RedisProcess) -> Iterator["redis.Redis"]:
    with redis_server.client() as opened:
        yield opened


@pytest.fixture
def counts() -> Counts:
    return Counts()


def send(client: "redis.Redis", counts: Counts, source: str = "one", *, is_reply_received: bool = True) -> None:
    """Send all pending counts. `is_heard` False: the first reply is lost."""
    while (sending := counts.pending()) is not None:
        ABSORB.run_blocking(client, **absorb_values("d", source, sending))
        if not is_reply_received:
            return
        counts.settle(sending)


def read_value(client: "redis.Redis", metric: Metric, *labels: str, part: str = "") -> float:
    value = client.hget(SUMS, f"{part}\t{encode_series(metric, labels)}")
    return float(value) if value is not None else 0.0  # type: ignore[arg-type]


@given(st.text(max_size=200), st.text(max_size=200))
def test_any_label_is_read_back_from_its_field(model: str, direction: str) -> None:
    counts = Counts()
    counts.count(TOKENS, model, direction, by=3)
    sending = counts.pending()
    (field,) = sending.totals
    assert parse_field(field) == (TOKENS, "", (clean_label(model), clean_label(direction)))
    assert "\n" not in field
    field.encode()


@given(st.text(max_size=60))
def test_any_field_is_rejected_or_parsed_to_a_known_metric(field: str) -> None:
    parsed = parse_field(field)
    assert parsed is None or field == f"{parsed[1]}\t{encode_series(parsed[0], parsed[2])}"


@pytest.mark.parametrize(
    "field",
    ["", "#x", "count\ttoolcrew_tool_calls_total\ta\tb\tc", "\ttoolcrew_nonesuch", "\ttoolcrew_hosts\ta\tb", "\t\t"],
)
def test_unknown_metric_fields_are_ignored(field: str) -> None:
    assert parse_field(field) is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, -math.inf])
def test_non_finite_or_negative_amount_is_not_counted(counts: Counts, client: "redis.Redis", value: float) -> None:
    counts.count(TOKENS, "m", "input", by=value)
    counts.count(TOKENS, "m", "output", by=2)
    send(client, counts)
    assert (read_value(client, TOKENS, "m", "input"), read_value(client, TOKENS, "m", "output")) == (0, 2)


def test_value_equal_to_a_bucket_bound_is_in_that_bucket(counts: Counts, client: "redis.Redis") -> None:
    for value in (0.5, 0.50001, 1e6):
        counts.observe(CALL_SECONDS, value, "bash_tool")
    send(client, counts)
    parts = {
        part: read_value(client, CALL_SECONDS, "bash_tool", part=part)
        for part in (COUNT, SUM, "le:0.5", "le:1", "le:600")
    }
    assert parts == {COUNT: 3, SUM: pytest.approx(1000001.00001), "le:0.5": 1, "le:1": 1, "le:600": 0}


@pytest.mark.parametrize(("lost_keys", "total"), [([counted_key("d", "one")], 6), (["*"], 1)], ids=["source", "all"])
def test_counting_continues_after_redis_loses_keys(
    counts: Counts, client: "redis.Redis", lost_keys: list[str], total: int
) -> None:
    counts.count(SANDBOX_OOM, by=5)
    send(client, counts)
    for pattern in lost_keys:
        client.delete(*client.keys(pattern))
    counts.count(SANDBOX_OOM)
    send(client, counts)
    assert read_value(client, SANDBOX_OOM) == total


def test_restarted_source_continues_its_total_without_repeats(client: "redis.Redis") -> None:
    for total, source in ((3, "one"), (4, "two"), (5, "one")):
        counts = Counts()
        counts.set_total(SANDBOX_OOM, "", total)
        send(client, counts, source)
    assert read_value(client, SANDBOX_OOM) == 9


def test_number_of_series_is_limited_in_the_process_and_in_redis(client: "redis.Redis") -> None:
    for source in ("one", "two", "three"):
        counts = Counts()
        for number in range(TOKENS.max_series * 2):
            counts.count(TOKENS, f"{source}-{number}", "input")
        send(client, counts, source)
        assert len(counts._totals) <= TOKENS.max_series + 1
    fields = [parse_field(field.decode()) for field in client.hkeys(SUMS)]  # type: ignore[union-attr]
    series = {parsed[2] for parsed in fields if parsed is not None}
    assert len(series) == TOKENS.max_series + 1
    assert read_value(client, TOKENS, OTHER, OTHER) == 5 * TOKENS.max_series


def test_histogram_above_the_series_limit_is_counted_as_other(counts: Counts, client: "redis.Redis") -> None:
    for number in range(CALL_SECONDS.max_series):
        counts.observe(CALL_SECONDS, 1, f"t{number}")
    send(client, counts)
    next_counts = Counts()
    next_counts.observe(CALL_SECONDS, 1, "late")
    send(client, next_counts, "two")
    assert [read_value(client, CALL_SECONDS, OTHER, part=part) for part in (COUNT, SUM, "le:1")] == [1, 1, 1]
    assert [read_value(client, CALL_SECONDS, "late", part=part) for part in (COUNT, SUM, "le:1")] == [0, 0, 0]


@given(st.lists(st.tuples(st.sampled_from(["a", "b"]), st.integers(1, 9), st.booleans()), max_size=20))
def test_lost_replies_do_not_change_the_counts(
    redis_process: RedisProcess, operations: list[tuple[str, int, bool]]
) -> None:
    with redis_process.client() as client:
        client.delete(SUMS, counted_key("d", "a"), counted_key("d", "b"))
        counts = {"a": Counts(), "b": Counts()}
        for source, by, is_reply_received in operations:
            counts[source].count(SANDBOX_OOM, by=by)
            send(client, counts[source], source, is_reply_received=is_reply_received)
        for source in counts:
            send(client, counts[source], source)
        assert read_value(client, SANDBOX_OOM) == sum(by for _, by, _ in operations)


def test_counts_made_during_a_send_are_sent_next(counts: Counts, client: "redis.Redis") -> None:
    counts.count(SANDBOX_OOM)
    sending = counts.pending()
    assert sending is not None
    counts.count(SANDBOX_OOM)
    counts.settle(sending)
    assert counts.pending() is not None


def test_decreasing_total_does_not_decrease_the_sum(counts: Counts, client: "redis.Redis") -> None:
    for total in (5, 2):
        counts.set_total(SANDBOX_OOM, "", total)
        send(client, counts)
    assert read_value(client, SANDBOX_OOM) == 5
