"""scripts/chaos: rounds of every kind on real processes, and a table of the results. The exit status is 1 if a check
failed.
"""

import argparse
import secrets
import sys
import time
from collections import Counter

from tests.chaos import batch_main, forks, graded
from tests.chaos.blows import BLOWS, TARGETS, Blow
from tests.chaos.rounds import Report, Terms, open_chaos, play
from tests.support.sandboxd.containers import open_engine

AT_ONCE = 5
"""Number of blows on one harness between two checks."""


def main() -> int:
    arguments = _parse_arguments()
    kinds = [blow for blow in BLOWS if arguments.only in (None, blow.target) and arguments.deed in (None, blow.deed)]
    seed = arguments.seed or secrets.token_hex(4)
    terms = Terms(drivers=arguments.drivers, sessions=arguments.sessions)
    _print_progress(f"seed {seed}: {arguments.rounds} rounds of each of {len(kinds)} kinds")
    wrong = 0
    for blow in kinds:
        reports = _play_kind(blow, arguments.rounds, terms, f"{seed}-{blow.deed}-{blow.target}")
        wrong += _print_row(blow, reports)
    return 1 if wrong else 0


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "scripts/chaos", description="Kill and pause every process under load, and check what must hold."
    )
    parser.add_argument("--rounds", type=int, default=20, help="of each kind")
    parser.add_argument("--only", choices=list(TARGETS), help="strike only these")
    parser.add_argument("--deed", choices=["kill", "pause"], help="strike only so")
    parser.add_argument("--seed", help="of the moments and the targets of the faults; printed when it is not given")
    parser.add_argument("--drivers", type=int, default=2, help="orchestrators")
    parser.add_argument("--sessions", type=int, default=5, help="of each orchestrator")
    return parser.parse_args()


def _play_kind(blow: Blow, rounds: int, terms: Terms, seed: str) -> list[Report]:
    """Play the rounds of one kind on one harness, with a check after every few blows."""
    reports = []
    try:
        with open_chaos(open_engine(), terms) as harness:
            for first in range(0, rounds, AT_ONCE):
                blows = [blow] * min(AT_ONCE, rounds - first)
                report = play(harness, blows, terms, f"{seed}-{first}", _print_progress)
                reports.append(report)
                if report.wrong:
                    _print_progress(harness.log_tails())
    except (AssertionError, Exception) as error:  # noqa: BLE001
        # Leftovers of a harness, or a failed start, become a row of the table.
        reports.append(Report(wrong=[f"{type(error).__name__}: {error}"]))
    return reports


def _print_row(blow: Blow, reports: list[Report]) -> int:
    """Print a row and return the number of failures."""
    wrong = [sentence for report in reports for sentence in report.wrong]
    verdicts = [report.verdict for report in reports if report.verdict is not None]
    codes: Counter[str] = Counter()
    for verdict in verdicts:
        codes.update(verdict.codes)
    row = {
        "rounds": sum(len(report.struck) for report in reports),
        "calls": sum(verdict.calls for verdict in verdicts),
        "ok": sum(verdict.succeeded for verdict in verdicts),
        "unanswered": sum(verdict.unanswered for verdict in verdicts),
        "slowest_s": max((verdict.slowest_s for verdict in verdicts), default=0.0),
        "settled_s": round(max((report.settled_s for report in reports), default=0.0), 1),
    }
    cells = "  ".join(f"{name} {value}" for name, value in row.items())
    sys.stdout.write(f"{'WRONG' if wrong else 'held'}  {blow!s:<20}  {cells}  {dict(codes)}\n")
    for sentence in wrong:
        sys.stdout.write(f"       {sentence}\n")
    sys.stdout.flush()
    return len(wrong)


def _print_progress(sentence: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {sentence}\n")


if __name__ == "__main__":
    others = {"batch": batch_main.main, "graded": graded.main, "forks": forks.main}
    sys.exit(others[sys.argv[1]](sys.argv[2:]) if sys.argv[1:2] and sys.argv[1] in others else main())
