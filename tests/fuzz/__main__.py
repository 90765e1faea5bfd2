"""`python -m tests.fuzz [N] [--seed S] [--first I]`: run N random inputs (default 1,000,000). The exit status is 1
after the first failure.
"""

import argparse
import secrets
import sys
import time

from tests.fuzz.runner import CHECKS, Failed, run

STEP = 10_000


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/fuzz", description=f"Random inputs for {', '.join(CHECKS)}.")
    parser.add_argument("count", nargs="?", type=int, default=1_000_000, metavar="N", help="inputs; default 1000000")
    parser.add_argument("--seed", type=int, default=None, help="repeats a run; default a new one")
    parser.add_argument("--first", type=int, default=0, metavar="I", help="number of the first input; default 0")
    options = parser.parse_args()
    seed = secrets.randbelow(2**32) if options.seed is None else options.seed
    _tell(f"seed {seed}, {options.count} inputs over {', '.join(CHECKS)}")
    started = time.monotonic()
    try:
        for done in range(0, options.count, STEP):
            run(seed, min(STEP, options.count - done), options.first + done)
            _tell(f"{min(done + STEP, options.count)} inputs, {time.monotonic() - started:.0f} s")
    except Failed as failed:
        _tell(f"FAILED: {failed}")
        return 1
    return 0


def _tell(line: str) -> None:
    sys.stdout.write(f"fuzz: {line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
