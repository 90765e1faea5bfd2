"""The statistics and the reports of scripts/bench. tests/benchmarks runs the benchmarks themselves."""

import asyncio
import json

import pytest

from benchmarks.report import Figure, Report, interleave, percentile


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([5.0], 0.95, 5.0),
        ([3.0, 1.0, 2.0], 0.5, 2.0),
        ([1.0, 2.0], 0.5, 1.5),
        ([0.0, 10.0], 0.95, 9.5),
        ([4.0, 8.0], 0.0, 4.0),
        ([4.0, 8.0], 1.0, 8.0),
    ],
)
def test_percentile_interpolates_between_neighbours(values: list[float], share: float, expected: float) -> None:
    assert percentile(values, share) == pytest.approx(expected)


def test_cases_take_turns_and_the_warm_up_is_dropped() -> None:
    order: list[str] = []
    numbers = {"a": iter(range(100)), "b": iter(range(100, 200))}

    def blocking() -> float:
        order.append("a")
        return float(next(numbers["a"]))

    async def awaited() -> float:
        order.append("b")
        return float(next(numbers["b"]))

    seconds = asyncio.run(interleave({"a": blocking, "b": awaited}, rounds=2, warm_up=1))

    assert order == ["a", "b"] * 3
    assert seconds == {"a": [1.0, 2.0], "b": [101.0, 102.0]}


@pytest.mark.parametrize(
    ("figure", "met", "verdict"),
    [
        (Figure("host_ratio", 2.5, "w", at_most=2.5), True, "target: at most 2.50 x, met"),
        (Figure("host_ratio", 2.51, "w", at_most=2.5), False, "target: at most 2.50 x, MISSED"),
        (Figure("exec_ratio", 11.9, "w", at_least=12.0), False, "target: at least 12.00 x, MISSED"),
        (Figure("sandbox_bytes", 5 * 2**20, "w", at_most=16 * 2**20), True, "target: at most 16.0 MiB, met"),
        (Figure("ours_ms", 3.0, "w"), None, ""),
    ],
)
def test_a_target_is_met_at_its_bound_and_missed_beyond(figure: Figure, met: bool | None, verdict: str) -> None:
    assert figure.met is met
    assert figure.verdict() == verdict


def test_report_as_text_and_as_json() -> None:
    report = Report("warm_call", notes=["on 2 cores"])
    report.add_ms("ours", [0.003, 0.001, 0.002], "ours")
    report.add("host_ratio", 2.0, "ours / host", at_most=2.5)
    report.add("ours_per_s", 412.4, "rate")

    text, data = report.as_text(), report.as_json()

    assert text.splitlines()[0] == "warm_call"
    assert "2.00 ms" in text
    assert "412 /s" in text
    assert "met" in text
    assert text.splitlines()[-1] == "  (on 2 cores)"
    assert json.loads(json.dumps(data)) == {
        "ours_ms": 2.0,
        "host_ratio": 2.0,
        "ours_per_s": 412.4,
        "targets": {"host_ratio": {"at_most": 2.5, "at_least": None, "met": True}},
        "notes": ["on 2 cores"],
    }
