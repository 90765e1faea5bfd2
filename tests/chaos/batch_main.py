"""`scripts/chaos batch`: rounds of batches under kills, and a row with the result of each round. The exit status is 1
if a check failed.
"""

import argparse
import secrets
import signal
import sys
import time
from collections.abc import Sequence

from tests.chaos.batch_blows import BATCH_BLOWS, KILLS
from tests.chaos.batch_rounds import BatchReport, BatchTerms, play_batch
from tests.chaos.rounds import Terms, open_chaos
from tests.support.sandboxd.containers import open_engine


def main(argv: Sequence[str]) -> int:
    arguments = _parse_arguments(argv)
    # SIGTERM must also stop the processes of the harness.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    seed = arguments.seed or secrets.token_hex(4)
    kinds = (arguments.only,) if arguments.only else KILLS
    terms = BatchTerms(arguments.runs, arguments.calls, arguments.concurrency, arguments.blows, kinds)
    _print_progress(
        f"seed {seed}: {arguments.rounds} rounds of {terms.runs} runs x {terms.calls} calls, {terms.blows} blows each"
    )
    wrong = 0
    with open_chaos(open_engine(), Terms(has_tools=False)) as harness:
        for number in range(arguments.first, arguments.first + arguments.rounds):
            report = play_batch(harness, terms, f"{seed}-{number}", f"round{number}", _print_progress)
            wrong += _print_row(number, report)
            if report.wrong:
                _print_progress(harness.log_tails())
    return 1 if wrong else 0


def _parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "scripts/chaos batch", description="Kill what works a batch at random moments, and check its files."
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--first", type=int, default=0, help="number of the first round: to play one again")
    parser.add_argument("--runs", type=int, default=100, help="items of each batch")
    parser.add_argument("--calls", type=int, default=5, help="of each item")
    parser.add_argument("--concurrency", type=int, default=16, help="items at a time, over both orchestrators")
    parser.add_argument("--blows", type=int, default=4, help="of each round, at moments spread over it")
    parser.add_argument(
        "--only",
        choices=[*BATCH_BLOWS, "pause"],
        help="strike only these; pause: an orchestrator, for longer than its leases",
    )
    parser.add_argument("--seed", help="of the moments and the targets of the faults; printed when it is not given")
    return parser.parse_args(argv)


def _print_row(number: int, report: BatchReport) -> int:
    """Print a row and return the number of failures."""
    verdict = report.verdict
    row: dict[str, object] = {"took_s": round(report.took_s, 1), "settled_s": round(report.settled_s, 1)}
    if verdict is not None:
        row |= {
            "items": verdict.items,
            "acts": verdict.acts,
            "unknown": verdict.unknown,
            "begun_anew": verdict.restarted,
            "replies_repeated": verdict.replies_repeated,
        }
    cells = "  ".join(f"{name} {value}" for name, value in row.items())
    sys.stdout.write(
        f"{'WRONG' if report.wrong else 'held'}  round {number}  {cells}  [{'; '.join(map(str, report.struck))}]\n"
    )
    for sentence in report.wrong:
        sys.stdout.write(f"       {sentence}\n")
    sys.stdout.flush()
    return len(report.wrong)


def _print_progress(sentence: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {sentence}\n")
