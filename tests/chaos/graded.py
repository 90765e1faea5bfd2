"""Chaos on graded items: half of them are right. No failure of the infrastructure may become a reward, and no right item
may lose its reward. `scripts/chaos graded` plays a long batch.
"""

import argparse
import json
import random
import secrets
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import redis

from tests.chaos.batch_blows import KILLS, strike
from tests.chaos.batch_load import BatchLoad
from tests.chaos.rounds import Terms, open_chaos, settle
from tests.model_server.running import running_model_server
from tests.support.sandboxd.containers import open_engine
from tests.support.stack.host_harness import Harness
from tests.support.stack.waiting import wait_until
from toolcrew.contract.tenancy import DEFAULT_TENANT
from toolcrew.store.batches import batch_key

_RIGHT = '[ "$(cat "$ARTIFACTS/answer")" = right ]'
GRADERS: tuple[dict[str, Any], ...] = (
    {"command": f"sleep 0.3; {_RIGHT}"},
    {"command": f"if {_RIGHT}; then r=1; else r=0; fi; echo 0 > r; sleep 0.3; echo $r > r", "reward_file": "r"},
)


@dataclass
class GradedReport:
    """The result of a batch. `ends`: how many items ended how."""

    ends: Counter[str] = field(default_factory=Counter)
    blows: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    took_s: float = 0.0


def play_graded(
    harness: Harness, items: int, blows: int, seed: str, mark: str, say: Callable[[str], None] = lambda _: None
) -> GradedReport:
    """Play a batch of graded items with blows at moments spread over it. `mark`: the id of the batch."""
    chance, report, began = random.Random(seed), GradedReport(), time.monotonic()
    with running_model_server([{"kind": "rule", "reply": {"text": "ok"}}]) as server:
        load = BatchLoad(harness, server, mark, items, 6)
        (load.folder / "in.jsonl").write_text("".join(json.dumps(build_line(item)) + "\n" for item in load.items))
        try:
            load.submit()
            load.join()
            kinds = [KILLS[number % len(KILLS)] for number in range(blows)]
            moments = sorted(int(items * chance.uniform(0.05, 0.85)) for _ in kinds)
            for kind, moment in zip(kinds, moments, strict=True):
                wait_until(lambda moment=moment: count_ended(load) >= moment, 600 + 10 * items, "items end")
                report.blows.append(str(strike(load, kind, chance)))
                say(report.blows[-1])
            report.wrong += load.wait(600 + 10 * items)
        finally:
            load.end()
    rows = {row["custom_id"]: row for row in load.orchestrators[0].rows()}
    for item in load.items:
        report.ends[_judge(item, rows.get(item), report.wrong)] += 1
    harness.has_orphans = True
    settle(harness, report.wrong)
    report.took_s = time.monotonic() - began
    return report


def build_line(item: str) -> dict[str, Any]:
    """Return the line of an item. Every second item writes the right answer."""
    number = int(item.rpartition("-")[2])
    command = f"printf {'right' if number % 2 else 'wrong'} > answer"
    grader = {**GRADERS[number // 2 % len(GRADERS)], "artifacts": ["answer"], "timeout_s": 120}
    return {"id": item, "tool": "bash_tool", "arguments": {"command": command}, "grader": grader}


def count_ended(load: BatchLoad) -> int:
    """Return how many items have ended; 0 while Redis does not answer."""
    try:
        with load.harness.open_redis() as client:
            return int(client.zcard(batch_key(load.harness.deployment, DEFAULT_TENANT, load.mark) + ":ended"))
    except redis.exceptions.RedisError:
        return 0


def _judge(item: str, row: dict[str, Any] | None, wrong: list[str]) -> str:
    """Return how an item ended. Adds a sentence to `wrong` unless that is its own reward or the infrastructure's failure."""
    if row is None:
        wrong.append(f"{item} has no row")
        return "no row"
    if row["grade"] is None:
        kind = str((row["error"] or {}).get("kind"))
        if kind != "infrastructure":
            wrong.append(f"{item} has no reward because of {row['error']}")
        return kind
    right = int(item.rpartition("-")[2]) % 2
    if row["grade"]["reward"] != right:
        wrong.append(f"{item} has the reward {row['grade']}, and {right} is right")
    return f"reward {row['grade']['reward']:g}"


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("scripts/chaos graded", description="Kill processes while items are graded.")
    parser.add_argument("--items", type=int, default=1000)
    parser.add_argument("--blows", type=int, default=30)
    parser.add_argument("--seed", help="of the moments; printed when it is not given")
    arguments = parser.parse_args(argv)
    # SIGTERM must also stop the processes of the harness.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    seed = arguments.seed or secrets.token_hex(4)
    _print_progress(f"seed {seed}: {arguments.items} items, {arguments.blows} blows")
    with open_chaos(open_engine(), Terms(has_tools=False)) as harness:
        report = play_graded(harness, arguments.items, arguments.blows, seed, "graded", _print_progress)
    _print_progress(f"{'WRONG' if report.wrong else 'held'}  took_s {report.took_s:.0f}  {dict(report.ends)}")
    for sentence in report.wrong:
        _print_progress(f"       {sentence}")
    return 1 if report.wrong else 0


def _print_progress(sentence: str) -> None:
    sys.stdout.write(f"{time.strftime('%H:%M:%S')} {sentence}\n")
    sys.stdout.flush()
