"""The model server's faults: each occurs when the script says so, and the orchestrator's client reports the right
error.
"""

import time
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from contract.errors import ModelUnavailable
from tests.model_server.in_process import OK, Lines, after_call, playing, read, user


def fault(kind: str, **fields: Any) -> dict[str, Any]:
    measures: dict[str, Any] = {
        name: fields.pop(name) for name in ("first", "per", "probability", "during_s", "when") if name in fields
    }
    return {"kind": "fault", "fault": {"kind": kind, **fields}, **measures}


async def test_the_client_retries_the_failed_first_requests() -> None:
    async with playing(fault("status", status=429, retry_after=0, first=2), OK) as server:
        for name in ("a", "b"):
            assert (await read(server.model(attempts=3), user(f"[item {name}] go"))).text == "ok"
        assert server.stats["faults"] == {"status": 4}
        # The request came again after its failure: identical, but no reply was repeated.
        assert server.stats["identical_requests"] == 4
        assert server.stats["replies_repeated"] == 0
        assert server.stats["replies"] == 2


@pytest.mark.parametrize("per", ["conversation", "step", "server"])
async def test_counts_are_kept_for_each_conversation_step_or_the_server(per: str) -> None:
    async with playing(fault("status", status=500, first=1, per=per), OK) as server:
        statuses = []
        for name in ("a", "b"):
            for messages in ([user(f"[item {name}]")], after_call(f"[item {name}]", "x")):
                statuses += [(await server.ask(*messages)).status_code for _ in range(2)]
        expected = {"conversation": [500, 200, 200, 200] * 2, "step": [500, 200] * 4, "server": [500] + [200] * 7}
        assert statuses == expected[per]


async def play_dice(order: Sequence[int], seed: int) -> dict[int, list[int]]:
    async with playing({"kind": "server", "seed": seed}, fault("status", status=503, probability=0.4), OK) as server:
        drawn: dict[int, list[int]] = {}
        for number in order:
            drawn.setdefault(number, []).append((await server.ask(user(f"[item {number}]"))).status_code)
        return drawn


async def test_the_seed_sets_the_faults_for_any_order_of_requests() -> None:
    numbers = [*range(20), *range(20)]
    drawn = await play_dice(numbers, 1)
    assert drawn == await play_dice(numbers[::-1], 1)
    assert drawn != await play_dice(numbers, 2)
    failed = sum(status == 503 for statuses in drawn.values() for status in statuses)
    assert 5 < failed < 30


@pytest.mark.parametrize("after_bytes", [0, 1, 200, 10**6])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_cut_reply_never_counts_as_whole(after_bytes: int, stream: bool) -> None:
    async with playing(fault("cut", after_bytes=after_bytes), OK) as server:
        with pytest.raises(httpx.RemoteProtocolError):
            await server.ask(user("go"), stream=stream)
        assert (server.stats["replies"], server.stats["faults"]) == (0, {"cut": 1})


@pytest.mark.parametrize("then", ["hold", "go_on"])
async def test_a_stream_that_does_not_end_lasts_until_its_client_goes(then: str) -> None:
    async with playing(fault("no_end", then=then), OK) as server:
        async with server.client.stream(
            "POST", "/v1/chat/completions", json={"messages": [user("go")], "stream": True}
        ) as reply:
            came = ""
            async for piece in reply.aiter_text():
                came += piece
                if then == "hold" or came.count("and on") > 3:
                    break
            assert "[DONE]" not in came
        await server.chat.gone.wait()
        assert server.stats["replies"] == 0


@pytest.mark.parametrize(
    "shape", ["no_choices", "empty_choices", "html", "truncated_json", "not_json", "empty", "told_error"]
)
@pytest.mark.parametrize("streaming", [True, False])
async def test_a_wrong_shape_is_no_reply_to_the_orchestrator_s_client(shape: str, streaming: bool) -> None:
    async with playing(fault("shape", shape=shape), OK) as server:
        with pytest.raises(ModelUnavailable):
            await read(server.model(streaming=streaming), user("go"))
        assert server.stats["faults"] == {"shape": 1}


async def test_delays_add_up_with_the_reply_s_own_waits_and_with_other_faults() -> None:
    slow = {"kind": "rule", "reply": {"text": "abcd", "chunk_chars": 1, "first_byte_s": 0.02, "chunk_s": [0.01, 0.02]}}
    lines: Lines = [
        fault("delay", first_byte_s=0.05),
        fault("delay", chunk_s=0.01),
        fault("status", status=500, when={"step": 1}),
        slow,
    ]
    async with playing(*lines) as server:
        started = time.monotonic()
        assert (await server.ask(user("go"), stream=True)).text.count("data: ") == 7
        # Seven events, six pauses. Only a lower bound: the machine may be busy.
        assert time.monotonic() - started >= 0.02 + 0.05 + 6 * 0.02
        started = time.monotonic()
        assert (await server.ask(*after_call("go", "x"))).status_code == 500
        assert time.monotonic() - started >= 0.05
        assert server.stats["faults"] == {"delay": 4, "status": 1}
