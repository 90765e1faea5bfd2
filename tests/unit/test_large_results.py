"""The worker's side of large results: stored under the tenant's key, retried over an outage, and reported if they
cannot be stored.
"""

from typing import Any

import pytest
import redis

from contract.calls import ToolResult
from contract.envelope import decode_result, join_result, kept_result_key
from contract.errors import BrokerUnavailable, ErrorCode, ToolFailure
from contract.names import is_blob_of
from contract.signing import ResultSeal
from store.blobs import WorkerBlobs
from tests.builders import KEY, build_call, build_context
from tests.conftest import RedisProcess
from workers.celery_edge import tasks
from workers.celery_edge.tasks import RECORD_TTL_S, encode_result_message

CALL, CONTEXT = build_call("echo"), build_context()
SEAL = ResultSeal(KEY, CONTEXT.tenant)


def result(output: str) -> ToolResult:
    return ToolResult(call_id=CALL.id, name=CALL.name, success=True, output=output)


class Failing:
    """Blobs that fail a number of times, and then store everything."""

    def __init__(self, times: int, error: Exception) -> None:
        self._times = times
        self._error = error
        self.kept: list[tuple[str, bytes, int]] = []

    def leave(self, tenant: str, data: bytes, ttl_s: int) -> str:
        if self._times:
            self._times -= 1
            raise self._error
        self.kept.append((tenant, data, ttl_s))
        return "key"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "PAUSE_S", 0.001)


def test_a_large_one_lies_under_a_key_of_the_tenants_for_longer_than_its_message(redis_server: RedisProcess) -> None:
    client: Any = redis.Redis.from_url(redis_server.url)
    encoded = encode_result_message(result("x" * 256 * 1024), CALL, CONTEXT, WorkerBlobs(client, "d", "sandbox"), KEY)
    key = kept_result_key(encoded)
    assert key is not None
    assert is_blob_of(key, "d", CONTEXT.tenant)
    assert RECORD_TTL_S - 30 < client.ttl(key) <= RECORD_TTL_S
    assert decode_result(join_result(encoded, client.get(key)), SEAL).output == "x" * 256 * 1024
    client.close()


def test_a_result_waits_for_a_redis_that_is_away_for_a_moment() -> None:
    blobs = Failing(3, BrokerUnavailable("away"))
    assert kept_result_key(encode_result_message(result("x" * 100_000), CALL, CONTEXT, blobs, KEY)) == "key"
    assert len(blobs.kept) == 1


@pytest.mark.parametrize(
    "error", [BrokerUnavailable("Redis is away"), ToolFailure(ErrorCode.FILE_TOO_LARGE, "too many bytes")]
)
def test_a_result_that_cannot_be_kept_says_that_the_call_has_run(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "KEEP_WAIT_S", 0.01)
    reply = decode_result(
        encode_result_message(result("x" * 100_000), CALL, CONTEXT, Failing(1_000_000, error), KEY), SEAL
    )
    assert (reply.success, reply.error_code) == (False, ErrorCode.OUTCOME_UNKNOWN)
    assert "has run" in str(reply.error)
    assert str(error) in str(reply.error)
