"""`python -m workers.sandboxd`: run the daemon; `--check` only says, as JSON, what this host can promise."""

import asyncio
import json
import secrets
import sys

from contract.errors import OperatorError
from workers.logs import configure_logging
from workers.sandboxd.daemon import cancelled_by_signals, prepare, run
from workers.sandboxd.engine import Engine
from workers.settings import SandboxdSettings, load_sandboxd_settings


def main() -> int:
    try:
        settings = load_sandboxd_settings()
        configure_logging(settings.log_level)
        if "--check" in sys.argv[1:]:
            return asyncio.run(_check(settings))
        asyncio.run(run(settings))
    except (OperatorError, OSError) as error:
        sys.stderr.write(f"sandboxd: {error}\n")
        return 1
    return 0


async def _check(settings: SandboxdSettings) -> int:
    """Print what `toolcrew doctor` wants to know of the engine: facts, and the first thing that is missing."""
    engine = Engine(threads=1)
    report: dict[str, object] = {"image": settings.sandbox_image, "runtime": settings.sandbox_runtime}
    try:
        with cancelled_by_signals():
            await _examine(settings, engine, report)
    except OperatorError as error:
        report["problem"] = str(error)
    except asyncio.CancelledError:
        report["problem"] = "ended by a signal before the check was done"
    finally:
        engine.close()
    sys.stdout.write(json.dumps(report) + "\n")
    return 1 if "problem" in report else 0


async def _examine(settings: SandboxdSettings, engine: Engine, report: dict[str, object]) -> None:
    """Adds to the report what is found. Raises SandboxUnavailable at the first thing that is missing."""
    facts = await engine.facts()
    report |= {
        "engine": facts.version,
        "kernel": facts.kernel,
        "cgroup": facts.cgroup_version,
        "seccomp": facts.seccomp,
        "runtimes": list(facts.runtimes),
    }
    report["image_id"] = await engine.image_id(settings.sandbox_image)
    # A name of its own: its sandbox is nobody's leftover, and nobody's sandboxes are its.
    await prepare(settings.model_copy(update={"sandboxd_name": f"doctor-{secrets.token_hex(8)}"}), engine)
    report["profile_holds"] = True


if __name__ == "__main__":
    sys.exit(main())
