"""Run benchmarks: `python -m benchmarks [NAME ...] [--runs N] [--smallest] [--json] [--check]`. The default is all.

The exit status is 1 if a benchmark fails, and with --check also if a target is missed. With --smallest the figures only
show that a benchmark runs.
"""

import argparse
import importlib
import json
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from benchmarks.report import Report
from benchmarks.sizes import use_smallest
from toolcrew.contract.errors import ToolcrewError

FOLDER = Path(__file__).parent
NAMES = tuple(
    sorted(
        path.stem
        for path in FOLDER.glob("*.py")
        if re.search(r"^def run\([^)]*\) -> Report:$", path.read_text(), re.MULTILINE)
    )
)
"""Modules of this folder with a function `run` that returns a report."""
GROUPS = {"batch": ("batch_runs", "batch_memory", "batch_queue")}
SIZED = ("batch_runs", "batch_memory")
"""Benchmarks that accept --runs."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/bench", description="Ours next to floors and peers, from one interleaved run each."
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"one of {', '.join(NAMES)}; batch: all of batches; default all"
    )
    parser.add_argument(
        "--runs", type=int, metavar="N", help=f"how many runs a batch has, of {' and '.join(SIZED)}; default 1000"
    )
    parser.add_argument("--model", default="0.5b", help="jobs: 0.5b, 1.5b, or a name at OPENAI_BASE_URL")
    parser.add_argument("--tools", help="jobs: names of tools with commas; default those of the profile")
    parser.add_argument("--dialect", default="auto", help="jobs: dialects to compare, with commas")
    parser.add_argument("--profile", default="auto", help="jobs: profiles to compare, with commas")
    parser.add_argument("--job-set", choices=("first", "held-out"), default="first", help="jobs: which set of jobs")
    parser.add_argument(
        "--smallest",
        action="store_true",
        help="run each at its smallest size, to see that it runs; the figures mean nothing",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a target is missed")
    options = parser.parse_args(argv)
    names = [name for given in options.names for name in GROUPS.get(given, (given,))] or NAMES
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        parser.error(f"unknown benchmark {unknown[0]}; there are {', '.join((*NAMES, *GROUPS))}")
    if options.runs is not None and (options.runs < 2 or not set(names) & set(SIZED)):
        parser.error(f"--runs is at least 2, and for {' and '.join(SIZED)}")
    if options.smallest:
        use_smallest()
    if not options.names:
        sys.stderr.write(
            f"bench: running all {len(names)} benchmarks; name some to run only those: {', '.join(names)}\n"
        )
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, _interrupt)
    try:
        reports = [report for name in names if (report := _try_run(name, options)) is not None]
    except KeyboardInterrupt:
        sys.stderr.write("bench: interrupted; everything it started has been taken down\n")
        return 130
    if options.json:
        print(json.dumps({"load_average": os.getloadavg(), **{report.name: report.as_json() for report in reports}}))
    missed = [figure.key for report in reports for figure in report.figures if figure.met is False]
    return 1 if len(reports) < len(names) or (missed and options.check) else 0


def _try_run(name: str, options: argparse.Namespace) -> Report | None:
    """Run the benchmark and return its report; None if it failed. The others then still run."""
    try:
        return _run(name, options, quiet=options.json)
    except (ToolcrewError, OSError) as error:
        sys.stderr.write(f"bench: {name}: {error}\n")
    except Exception:  # noqa: BLE001  # a defect of one benchmark must not hide the figures of the others
        sys.stderr.write(f"bench: {name}: {traceback.format_exc()}\n")
    return None


def _run(name: str, options: argparse.Namespace, *, quiet: bool) -> Report:
    """Run the benchmark and return its report. The module is imported here: a benchmark needs only its own
    dependencies.
    """
    run: Callable[..., Report] = importlib.import_module(f"benchmarks.{name}").run
    before = os.getloadavg()[0]
    if name == "jobs":
        report = run(options.model, options.tools, options.dialect, options.profile, options.job_set)
    else:
        report = run(options.runs) if options.runs is not None and name in SIZED else run()
    report.notes.append(f"load average {before:.1f} before, {os.getloadavg()[0]:.1f} after, on {os.cpu_count()} cores")
    if not quiet:
        print(report.as_text(), flush=True)
    return report


def _interrupt(_number: int, _frame: object) -> None:
    # Handle the signal once: a second signal must not interrupt the clean-up that follows.
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
