"""Rounds of chaos on batches. Two orchestrators process one batch, faults are applied, and at the end the files are
checked.
"""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.batch_blows import KILLS, PAUSE_S, BatchBlow, Blow, strike
from tests.chaos.batch_load import BatchLoad, build_script
from tests.chaos.batch_verdict import BatchVerdict, Evidence, judge_batch, read_tally
from tests.chaos.rounds import settle
from tests.model_server.running import running_model_server
from tests.support.stack.host_harness import Harness
from tests.support.stack.waiting import wait_until
from toolcrew.contract.names import run_key, runs_prefix
from toolcrew.contract.tenancy import DEFAULT_TENANT
from toolcrew.orchestrator.runs.batches import run_id
from toolcrew.store.batches import batch_key

LATEST = 0.85
"""The part of the replies before which all faults are applied."""


@dataclass(frozen=True)
class BatchTerms:
    """Parameters of a round. `concurrency`: items at a time, over both orchestrators. `blows`: faults of a round,
    chosen from `kinds`. `call_s`: duration of each call, without the time of its marks.
    """

    runs: int = 100
    calls: int = 5
    concurrency: int = 16
    blows: int = 4
    kinds: Sequence[BatchBlow] = KILLS
    call_s: float = 0.1

    @property
    def within_s(self) -> float:
        """Return a limit that is longer than a batch needs on a busy machine."""
        return 300.0 + self.runs * (2.0 + self.calls) + self.blows * PAUSE_S


@dataclass
class BatchReport:
    """The result of a round. `wrong` is empty if all checks passed."""

    struck: list[Blow] = field(default_factory=list)
    verdict: BatchVerdict | None = None
    wrong: list[str] = field(default_factory=list)
    took_s: float = 0.0
    settled_s: float = 0.0


def play_batch(
    harness: Harness, terms: BatchTerms, seed: str, mark: str, say: Callable[[str], None] = lambda _: None
) -> BatchReport:
    """Play one batch and check it. The batch is submitted, processed by two orchestrators under faults, and resumed
    after its end. `mark`: the batch's id.
    """
    chance, report, began = random.Random(seed), BatchReport(), time.monotonic()
    with running_model_server(build_script(terms.calls, terms.call_s)) as server:
        load = BatchLoad(harness, server, mark, terms.runs, terms.concurrency)
        try:
            load.submit()
            load.join()
            for kind, moment in _plan(terms, chance):
                if not _wait_until_replies(load, moment, terms.within_s):
                    break
                report.struck.append(strike(load, kind, chance))
                say(str(report.struck[-1]))
            report.wrong += load.wait(terms.within_s)
            report.wrong += load.resume(terms.within_s)
            report.took_s = time.monotonic() - began
            replies = _replies(server.stats())
        finally:
            load.end()
    harness.has_orphans |= any(blow.held for blow in report.struck)
    report.settled_s = settle(harness, report.wrong)
    report.verdict = judge_batch(_gather(load, terms, replies, report.struck))
    report.wrong += [*report.verdict.wrong, *_left_in_redis(harness, load)]
    return report


def _plan(terms: BatchTerms, chance: random.Random) -> list[tuple[BatchBlow, int]]:
    """Return the faults, each with the number of model replies after which it is applied. Each kind appears at least
    once if there are enough blows.
    """
    kinds = [*chance.sample(list(terms.kinds), min(len(terms.kinds), terms.blows))]
    kinds += chance.choices(list(terms.kinds), k=terms.blows - len(kinds))
    whole = terms.runs * (terms.calls + 1)
    return list(zip(kinds, sorted(int(whole * chance.uniform(0.0, LATEST)) for _ in kinds), strict=True))


def _wait_until_replies(load: BatchLoad, count: int, within_s: float) -> bool:
    """Wait for `count` replies. Returns False if the batch ends before."""
    wait_until(
        lambda: load.server.stats()["replies"] >= count or not load.living(), within_s, lambda: str(load.server.stats())
    )
    return bool(load.living())


def _replies(stats: Mapping[str, Any]) -> dict[str, dict[int, int]]:
    return {
        item: {int(step): count for step, count in result["replies"].items()}
        for item, result in stats["conversations"].items()
    }


def _gather(
    load: BatchLoad, terms: BatchTerms, replies: Mapping[str, Mapping[int, int]], blows: Sequence[Blow]
) -> Evidence:
    runs = {item: run_id(DEFAULT_TENANT, load.mark, item) for item in load.items}
    deployment = load.harness.deployment
    with load.harness.open_redis() as client:
        attempts = {
            item: int(client.hget(run_key(deployment, DEFAULT_TENANT, run), "attempt") or 0)
            for item, run in runs.items()
        }
    # The last resume wrote into the files of the first orchestrator.
    first, *others = load.orchestrators[:-1]
    return Evidence(
        items=load.items,
        calls=terms.calls,
        rows={one.name: one.rows() for one in (first, *others)},
        acts=read_tally(load.harness.tally, load.mark),
        attempts=attempts,
        replies=replies,
        struck={item: sum(run in blow.held for blow in blows) for item, run in runs.items()},
        may_lose=any(blow.kind not in ("orchestrator", "pause") for blow in blows),
        may_repeat=any(blow.kind == "forget" for blow in blows),
    )


def _left_in_redis(harness: Harness, load: BatchLoad) -> list[str]:
    """Return everything of the batch that exists twice in Redis or still waits."""
    key, prefix = batch_key(harness.deployment, DEFAULT_TENANT, load.mark), runs_prefix(harness.deployment)
    wanted = sorted(run_id(DEFAULT_TENANT, load.mark, item) for item in load.items)
    with harness.open_redis() as client:
        items = sorted(run.decode() for run in client.lrange(f"{key}:items", 0, -1))
        ended = sorted(run.decode() for run in client.zrange(f"{key}:ended", 0, -1))
        counted = int(client.hget(key, "succeeded") or 0)
        open_sets = [f"{key}:waiting", f"{key}:running", f"{prefix}leases", f"{prefix}delayed", f"{prefix}batches"]
        leftovers = [name for name in open_sets if client.exists(name)]
    wrong = [f"{name} is not empty though the batch has ended" for name in leftovers]
    wrong += [f"Redis knows {len(items)} items of {len(wanted)}, some of them twice or not at all"] * (items != wanted)
    wrong += [f"Redis knows {len(ended)} ended items of {len(wanted)}"] * (ended != wanted)
    wrong += [f"Redis counts {counted} successes of {len(wanted)}"] * (counted != len(wanted))
    return wrong
