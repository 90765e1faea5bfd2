"""Secrets, arguments and outputs in a whole stack. The tests search every place that an operator, another tenant or
an attacker can read, and find none of them.

Arguments and outputs may be in Redis while their call runs. The tests check the data that remains, and the data that
other clients receive meanwhile.
"""

import base64
import json
import os
import secrets
import threading
import urllib.request
from collections.abc import Iterable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import redis
from docker import APIClient
from pydantic import SecretStr

from tests.support.records.builders import build_attempt
from tests.support.sandboxd.containers import watch
from tests.support.stack.processes import read_proc
from tests.support.stack.stack import Stack, all_pids, open_stack
from tests.support.stack.waiting import SOON_S, wait_until_async
from toolcrew.contract.errors import ErrorCode
from toolcrew.contract.names import POOL_WEB
from toolcrew.contract.settings import OrchestratorSettings
from toolcrew.orchestrator.dispatch.celery_transport import build_message
from toolcrew.orchestrator.sdk.client import ToolClient
from toolcrew.store.api_keys import ApiKeys
from toolcrew.store.connection import open_redis

pytestmark = pytest.mark.stack


def make_canary(kind: str) -> str:
    """Return a unique word, in letters that no encoding changes."""
    return f"canary{kind}{secrets.token_hex(12)}"


SECRET, PREVIOUS, ARGUMENT, OUTPUT, LARGE = (
    make_canary(what) for what in ("secret", "previous", "argument", "output", "large")
)


@pytest.fixture(scope="module")
def watched_stack(engine: APIClient) -> Iterator[Stack]:
    signing = {"TOOLCREW_SECRET": SECRET, "TOOLCREW_SECRETS_PREVIOUS": json.dumps([PREVIOUS])}
    with open_stack(engine, signing, workers_only=False) as opened:
        yield opened


class ChannelListener:
    """A listener on every Celery channel while calls run. Results are excluded, because they are for the caller."""

    def __init__(self, client: "redis.Redis") -> None:
        self._pubsub = client.pubsub()
        self.events_received: list[bytes] = []
        self._stop = threading.Event()
        self._pubsub.psubscribe("/*")
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        while not self._stop.is_set():
            message = self._pubsub.get_message(timeout=0.2)
            if message is not None and message["type"] == "pmessage":
                self.events_received.append(bytes(message["data"]))

    def __enter__(self) -> "ChannelListener":
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._pubsub.close()

    def received_bytes(self) -> bytes:
        """Return all received data, raw and unpacked."""
        return b"\n".join(self.events_received + [_unpacked(data) for data in self.events_received])


def _unpacked(data: bytes) -> bytes:
    """Return a message's body, which kombu encodes in base64."""
    try:
        return base64.b64decode(json.loads(data)["body"])
    except (ValueError, KeyError, TypeError):
        return b""


def dump(client: "redis.Redis") -> bytes:
    """Return every key and value of Redis."""
    readers = {
        b"string": client.get,
        b"hash": client.hgetall,
        b"list": lambda key: client.lrange(key, 0, -1),
        b"set": client.smembers,
        b"zset": lambda key: client.zrange(key, 0, -1, withscores=True),
        b"stream": lambda key: client.xrange(key),
    }
    found = []
    for key in client.scan_iter(count=1000):
        value = readers.get(client.type(key), lambda _: None)(key)  # type: ignore[no-untyped-call]
        found.append(key + b" " + repr(value).encode())
        found += [_unpacked(item) for item in value if isinstance(item, bytes)] if isinstance(value, list) else []
    return b"\n".join(found)


def flower(stack: Stack, path: str) -> bytes:
    assert stack.info.flower_url is not None
    parts = urlsplit(stack.info.flower_url)
    request = urllib.request.Request(f"http://{parts.hostname}:{parts.port}{path}")
    request.add_header(
        "Authorization", "Basic " + base64.b64encode(f"{parts.username}:{parts.password}".encode()).decode()
    )
    with urllib.request.urlopen(request, timeout=20) as answer:
        return bytes(answer.read())


def is_flower_ready(stack: Stack) -> bool:
    """Return whether Flower serves and lists both workers."""
    try:
        return flower(stack, "/api/workers?refresh=1").count(b'"pid"') >= 2
    except OSError:
        return False


def logs(stack: Stack) -> bytes:
    return b"\n".join(path.read_bytes() for path in Path(stack.info.logs).glob("*.log"))


def command_lines() -> bytes:
    """Return the command lines of all processes of this host, except this process, because pytest knows the
    parameters.
    """
    return b"\n".join(read_proc(pid, "cmdline") for pid in all_pids() if pid != os.getpid())


def find_canaries(where: dict[str, bytes], canaries: Iterable[str]) -> set[tuple[str, str]]:
    return {(place, word) for place, text in where.items() for word in canaries if word.encode() in text}


async def test_no_secret_argument_or_output_is_left_where_others_can_read(watched_stack: Stack) -> None:
    url = SecretStr(watched_stack.redis_url)
    password = urlsplit(watched_stack.redis_url).password or ""
    assert password
    settings = OrchestratorSettings(redis_url=url, secret=SecretStr(SECRET))
    # The listener receives only events that happen while it is connected.
    await wait_until_async(lambda: is_flower_ready(watched_stack), SOON_S, lambda: watched_stack.log("flower"))
    with watched_stack.open_redis() as store, ChannelListener(store) as eavesdropper:
        async with ToolClient.connect(settings=settings) as client, await client.open_session() as session:
            good = await session.call(
                "bash_tool", {"command": f"echo {ARGUMENT} | sed s/{ARGUMENT[:9]}/x/; echo {OUTPUT}"}
            )
            assert OUTPUT in str(good.output)
            large = await session.call("bash_tool", {"command": f"yes {LARGE} | head -c 150000"})
            assert LARGE in str(large.output)
            bad = await session.call("read_tool", {"file_path": f"/workspace/{ARGUMENT}"})
            assert bad.error_code is ErrorCode.FILE_NOT_FOUND
            sandbox = good.sandbox
            assert sandbox is not None
            inspected = watch(watched_stack.api, sandbox.id).described().encode()
            listed = command_lines()
        await wait_until_async(
            lambda: flower(watched_stack, "/api/tasks").count(b"SUCCESS") >= 3,
            SOON_S,
            lambda: str(flower(watched_stack, "/api/tasks")),
        )
        called = flower(watched_stack, "/api/tasks")
        everywhere = {
            "events": eavesdropper.received_bytes(),
            "Flower's tasks": called,
            "Flower's workers": flower(watched_stack, "/api/workers?refresh=1"),
            "Flower's metrics": flower(watched_stack, "/metrics"),
            "logs": logs(watched_stack),
            "command lines": listed,
            "the container": inspected,
        }
        assert b"task-succeeded" in everywhere["events"]
        await wait_until_async(
            lambda: not find_canaries({"Redis": dump(store)}, (ARGUMENT, OUTPUT, LARGE)),
            SOON_S,
            lambda: str(dump(store))[:4000],
        )
        everywhere["Redis"] = dump(store)
    assert find_canaries(everywhere, (SECRET, PREVIOUS, ARGUMENT, OUTPUT, LARGE, password)) == set()


async def test_an_api_key_is_stored_nowhere(watched_stack: Stack) -> None:
    settings = OrchestratorSettings(redis_url=SecretStr(watched_stack.redis_url), secret=SecretStr(SECRET))
    opened = open_redis(settings.broker())
    key = (await ApiKeys(opened, settings.deployment, settings.broker().signing_keys()).add("default")).text
    await opened.aclose()
    async with ToolClient.connect(settings=settings, api_key=key) as client, await client.open_session() as session:
        assert (await session.call("bash_tool", {"command": "env"})).success
    with watched_stack.open_redis() as store:
        everywhere = {
            "Redis": dump(store),
            "logs": logs(watched_stack),
            "command lines": command_lines(),
            "Flower": flower(watched_stack, "/api/tasks"),
        }
    # The secret part may contain a "_". The part after the last "_" may be a single letter, which appears everywhere.
    assert find_canaries(everywhere, (key, key.split("_", 2)[2])) == set()


async def test_a_message_for_an_unknown_task_is_not_logged_with_its_content(watched_stack: Stack) -> None:
    """Celery logs the whole message of an unknown task. An orchestrator of another release may send such a message
    with a tenant's arguments.
    """
    word = make_canary("stranger")
    message = build_message(
        build_attempt("of_tomorrow", tenant="default", queue=POOL_WEB, call_id="c9", envelope=word), "00-c9", "none"
    )
    with watched_stack.open_redis() as store:
        before = len(watched_stack.log("web"))
        store.lpush(POOL_WEB, message)
        await wait_until_async(
            lambda: "of_tomorrow" in watched_stack.log("web")[before:], SOON_S, lambda: watched_stack.log("web")[-2000:]
        )
    assert word not in watched_stack.log("web")
