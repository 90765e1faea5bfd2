"""The model server's faults: each occurs when the script says so, and the orchestrator's client reports the right
error.
"""

from typing import Any

import httpx
import pytest

from contract.errors import ModelUnavailable
from tests.model_server.in_process import OK, playing, read, user


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
