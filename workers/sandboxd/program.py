"""The daemon as a program: it serves until a signal; `--check` only says what this host can promise, with `--json` for programs."""

import argparse
import asyncio
import json
import sys
from dataclasses import asdict
from typing import Any

from contract.errors import OperatorError
from workers.logs import configure_logging, tell_not_started
from workers.sandboxd.daemon import cancelled_by_signals, run
from workers.sandboxd.engine import Engine
from workers.sandboxd.examination import examine
from workers.sandboxd.plans import load_plans
from workers.sandboxd.promises import Evidence, HostPromise, judge
from workers.settings import SandboxdSettings, load_sandboxd_settings


def main() -> int:
    arguments = _parse_arguments()
    try:
        settings = load_sandboxd_settings()
        # What a check finds is in its rows.
        configure_logging("sandboxd", settings, "ERROR" if arguments.check else None)
        if arguments.check:
            return asyncio.run(_check(settings, as_json=arguments.json))
        asyncio.run(run(settings))
    except (OperatorError, OSError) as error:
        if arguments.check:
            sys.stderr.write(f"sandboxd: {error}\n")
        else:
            tell_not_started("sandboxd", error)
        return 1
    return 0


def _parse_arguments() -> argparse.Namespace:
    """Ends the process at an argument that there is not: whoever meant a check gets no daemon."""
    parser = argparse.ArgumentParser("python -m workers.sandboxd", description="Serve sandboxes of this host until a signal.")
    parser.add_argument("--check", action="store_true", help="only say what this host can promise; exit code 1: sandboxd would not start")
    parser.add_argument("--json", action="store_true", help="of a check: for programs")
    arguments = parser.parse_args()
    if arguments.json and not arguments.check:
        parser.error("--json goes with --check")
    return arguments


async def _check(settings: SandboxdSettings, *, as_json: bool) -> int:
    """Print the table of promises; 1 when sandboxd would not start."""
    plans = load_plans(settings)
    engine = Engine()
    try:
        with cancelled_by_signals():
            evidence = await examine(settings, plans, engine)
    except asyncio.CancelledError:
        sys.stderr.write("sandboxd: ended by a signal before the check was done\n")
        return 1
    finally:
        engine.close()
    rows = judge(evidence)
    sys.stdout.write(json.dumps(_build_report(evidence, rows)) + "\n" if as_json else "".join(map(_show, rows)))
    return 1 if any(row.is_needed and row.state == "void" for row in rows) else 0


def _build_report(evidence: Evidence, rows: tuple[HostPromise, ...]) -> dict[str, Any]:
    """What `toolcrew doctor` reads."""
    facts, settings = evidence.facts, evidence.settings
    report: dict[str, Any] = {"image": settings.sandbox_image, "runtime": settings.sandbox_runtime}
    report["promises"] = [asdict(row) for row in rows]
    if facts is not None:
        report |= {
            "engine": facts.version,
            "kernel": facts.kernel,
            "cgroup": facts.cgroup_version,
            "seccomp": facts.seccomp,
            "runtimes": list(facts.runtimes),
            "components": dict(facts.components),
            "storage_driver": facts.storage_driver,
            "image_id": evidence.images.get(settings.sandbox_image),
        }
    return report | ({"problem": evidence.problem} if evidence.problem is not None else {})


def _show(row: HostPromise) -> str:
    remedy = f"\n         do: {row.remedy}" if row.state != "holds" and row.remedy else ""
    return f"{row.state:<7}  {row.name}: {row.why}{remedy}\n"
