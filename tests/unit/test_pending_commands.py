"""Commands whose replies no caller awaits: each dropped command leaves a log line, and the order is preserved."""

import asyncio
from typing import Any, cast

import pytest
import redis.asyncio
from redis.exceptions import NoPermissionError, OutOfMemoryError, ReadOnlyError, ResponseError

from store import call_events
from store.call_events import PendingCommands

DEL, PUSH, TRIM = ("DEL", "a"), ("LPUSH", "b", 1), ("LTRIM", "b", 0, 0)


class AnsweringRedis:
    """Answers each command once with the scripted reply for its name, and then with 1."""

    def __init__(self, **answers: Exception) -> None:
        self.answers = answers
        self.sent: list[list[Any]] = []

    def pipeline(self, *, transaction: bool) -> "AnsweringRedis":
        self.sent.append([])
        return self

    def execute_command(self, *command: Any) -> None:
        self.sent[-1].append(command)

    async def execute(self, *, raise_on_error: bool) -> list[Any]:
        return [self.answers.pop(command[0], 1) for command in self.sent[-1]]


async def send_all(server: AnsweringRedis) -> None:
    pending = PendingCommands(cast("redis.asyncio.Redis", server))
    pending.add(DEL, PUSH, TRIM)
    await asyncio.wait_for(pending.close(10), 20)


@pytest.mark.parametrize(
    "error", [NoPermissionError("no"), ResponseError("WRONGTYPE of key"), ResponseError("unknown command")]
)
async def test_a_refused_command_is_logged(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    server = AnsweringRedis(LPUSH=error)
    await send_all(server)
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    assert record.getMessage().split(" error=")[0] == "event=redis_command_refused command=LPUSH key=b"
    assert server.sent == [[DEL, PUSH, TRIM]]


@pytest.mark.parametrize("error", [OutOfMemoryError("full"), ReadOnlyError("replica"), ResponseError("MISCONF disk")])
async def test_a_command_that_redis_cannot_run_now_is_sent_again_with_those_behind_it(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(call_events, "RETRY_S", 0)
    server = AnsweringRedis(LPUSH=error)
    await send_all(server)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage().split(" error=")[0] == "event=redis_commands_delayed commands=2"
    assert server.sent == [[DEL, PUSH, TRIM], [PUSH, TRIM]]
