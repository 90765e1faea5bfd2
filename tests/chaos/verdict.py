"""Check the records of the drivers and the tally. Every call has one result and executes at most once, and every
successful call has executed.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ACTING = ("bash_tool", "tally_tool")
NEVER_STARTED = ("HOST_LOST",)
"""Error codes that guarantee that the call was not executed."""
LONGEST_S = 120.0
"""Limit for a result, in seconds: the wait for a slot, the call's limit, all retries, and a pause of the
orchestrator.
"""


@dataclass
class CallRecord:
    """A call as its driver recorded it."""

    id: str
    driver: str
    tool: str
    session: str
    results: list[Mapping[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Verdict:
    """The result of the checks. `wrong`: sentences; empty if all checks passed. `codes`: the final codes of the
    calls. `lost_sessions`: sessions that were reported as lost.
    """

    wrong: tuple[str, ...]
    calls: int
    succeeded: int
    unanswered: int
    codes: Mapping[str, int]
    lost_sessions: int
    slowest_s: float


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the records of a driver. An incomplete last line is left out."""
    lines = path.read_text().split("\n")
    return [json.loads(line) for line in lines[:-1]]


def count_acts(tally: Path) -> Counter[str]:
    """Return call id -> number of executions."""
    return Counter({file.name: len(file.read_text().splitlines()) for file in tally.iterdir()})


def gather(lines: Iterable[Mapping[str, Any]]) -> dict[str, CallRecord]:
    """Return the calls by id."""
    calls: dict[str, CallRecord] = {}
    for line in lines:
        if line["event"] == "sent":
            calls[line["call"]] = CallRecord(line["call"], line["driver"], line["tool"], line["session"])
        elif line["event"] == "result":
            calls[line["call"]].results.append(line)
    return calls


def judge(lines: Iterable[Mapping[str, Any]], acts: Mapping[str, int], killed: Iterable[str]) -> Verdict:
    """Check the records. `killed`: the killed drivers, whose calls need no result."""
    lines, killed = list(lines), set(killed)
    calls = gather(lines)
    wrong = [
        sentence
        for call in calls.values()
        for sentence in _judge_call(call, acts.get(call.id, 0), is_owed=call.driver not in killed)
    ]
    wrong += [f"{call} acted, and no client sent it" for call in acts if call not in calls]
    results = [result for call in calls.values() for result in call.results]
    return Verdict(
        wrong=tuple(wrong),
        calls=len(calls),
        succeeded=sum(1 for result in results if result["success"]),
        unanswered=sum(1 for call in calls.values() if not call.results),
        codes=Counter(str(result["code"]) for result in results if not result["success"]),
        lost_sessions=len(
            {calls[result["call"]].session for result in results if result["code"] == "SESSION_NOT_FOUND"}
        ),
        slowest_s=max((result["took_s"] for result in results), default=0.0),
    )


def _judge_call(call: CallRecord, acted: int, *, is_owed: bool) -> Iterable[str]:
    if len(call.results) > 1:
        yield f"{call.id} ({call.tool}) got {len(call.results)} results"
    # A killed driver can no longer record results, so only the other drivers must have one for each call.
    if is_owed and not call.results:
        yield f"{call.id} ({call.tool}) got no result"
    if acted > 1:
        yield f"{call.id} ({call.tool}) acted {acted} times; its result: {_shown(call)}"
    for result in call.results:
        if result["answers"] != call.id:
            yield f"{call.id} got the result of {result['answers']}"
        if result["took_s"] > LONGEST_S:
            yield f"{call.id} ({call.tool}) took {result['took_s']} s: {_shown(call)}"
        yield from _judge_result(call, result, acted)


def _judge_result(call: CallRecord, result: Mapping[str, Any], acted: int) -> Iterable[str]:
    if call.tool in ACTING:
        if result["success"] and (acted != 1 or f"acted {call.id}" not in result["output"]):
            yield f"{call.id} ({call.tool}) was answered as a success and acted {acted} times: {_shown(call)}"
        # Callers retry these codes without a check, so a call with such a code must not have executed.
        if result["code"] in NEVER_STARTED and acted:
            yield f"{call.id} ({call.tool}) acted, and its result says that it never started: {_shown(call)}"
    elif result["success"] and "known words" not in result["output"]:
        yield f"{call.id} ({call.tool}) read something else: {_shown(call)}"
    if result["code"] in ("INTERNAL", "ENVELOPE_REFUSED"):
        yield f"{call.id} ({call.tool}) met a bug: {_shown(call)}"


def _shown(call: CallRecord) -> str:
    return (
        "; ".join(f"{result['code']}: {result['error'] or result['output']}" for result in call.results)[:400] or "none"
    )
