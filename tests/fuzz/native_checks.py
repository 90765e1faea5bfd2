"""Invariants of the assembler of native calls, for any sequence of deltas."""

import json
from random import Random
from typing import Any

from tests.fuzz.tag_texts import random_arguments, random_cuts
from toolcrew.orchestrator.dialects.native_assembler import NativeCallAssembler, NativeReply

_JUNK = (
    None, True, 0, 1, -1, 7, 1.5, float("nan"), "", "0", "1", "a", "{}", "{", '{"x":1}', "null", "\ud83d", "\ude00", "[1]", [], {}, "stop", "\0",
)  # fmt: skip
_KEYS = ("index", "id", "function", "name", "arguments", "content", "tool_calls", "choices", "delta", "finish_reason")


def check_native(random: Random) -> None:
    """Check that valid streams give the intended calls, and that every stream ends without an exception."""
    if random.random() < 0.5:
        check_round_trip(random)
    else:
        check_junk(random)


def check_round_trip(random: Random) -> None:
    wanted = [(f"c{index}", f"t{index}", random_arguments(random)) for index in range(random.randrange(1, 4))]
    queues = []
    for index, (call_id, name, arguments) in enumerate(wanted):
        raw = json.dumps(arguments, ensure_ascii=random.random() < 0.5)
        first: dict[str, Any] = {
            "index": index,
            "id": call_id,
            "function": {"name": name, "arguments": random.choice(("", None))},
        }
        queues.append(
            [first, *({"index": index, "function": {"arguments": part}} for part in random_cuts(random, raw))]
        )
    entries = []
    while queues:
        queue = random.choice(queues)
        entries.append(queue.pop(0))
        queues = [queue for queue in queues if queue]
    reply = _assemble([{"tool_calls": [entry]} for entry in entries])
    assert [(call.id, call.name, call.arguments) for call in reply.calls] == wanted, f"{entries!r} gives {reply!r}"


def check_junk(random: Random) -> None:
    """Check deltas whose parts have any type. The result can always be sent: JSON in UTF-8, with distinct ids."""
    deltas = [_junk_delta(random) for _ in range(random.randrange(6))]
    reply = _assemble(deltas)
    json.dumps([call.arguments for call in reply.calls], allow_nan=False)
    found = reply.in_order()
    (reply.text + "".join(f"{call.id}{call.name}{call.raw}" for call in found)).encode()
    assert len({call.id for call in found}) == len(found), f"{deltas!r} gives an id twice"
    assert [call.position for call in found] == list(range(len(found)))


def _junk_delta(random: Random) -> Any:
    entry: dict[str, Any] = {key: _junk(random, 0) for key in ("index", "id") if random.random() < 0.7}
    entry["function"] = {key: _junk(random, 0) for key in ("name", "arguments") if random.random() < 0.8}
    entries = [entry if random.random() < 0.9 else _junk(random, 0) for _ in range(random.randrange(3))]
    return {"tool_calls": entries, "content": _junk(random, 0)} if random.random() < 0.9 else _junk(random, 0)


def _junk(random: Random, depth: int) -> Any:
    if depth < 3 and random.random() < 0.2:
        if random.random() < 0.5:
            return [_junk(random, depth + 1) for _ in range(random.randrange(3))]
        return {random.choice(_KEYS): _junk(random, depth + 1) for _ in range(random.randrange(3))}
    return random.choice(_JUNK)


def _assemble(deltas: list[Any]) -> NativeReply:
    assembler = NativeCallAssembler("fuzz", 1)
    for delta in deltas:
        assembler.feed({"choices": [{"index": 0, "delta": delta}]})
    return assembler.finish(strict=False)
