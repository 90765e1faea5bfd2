"""The command line of the daemon. It serves until a signal. `--check` only reports what this host can guarantee, with
`--json` for programs.
"""

import argparse
import asyncio
import contextlib
import json
import secrets
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from toolcrew.contract.errors import OperatorError
from toolcrew.contract.settings import SandboxdSettings, read_environment
from toolcrew.workers.logs import configure_logging, log_not_started
from toolcrew.workers.sandboxd.daemon import cancelled_by_signals, open_daemon, run
from toolcrew.workers.sandboxd.egress.relay import connect_proxy
from toolcrew.workers.sandboxd.guarantees import Evidence, HostGuarantee, WorkspaceFacts, build_rows, read_host_facts
from toolcrew.workers.sandboxd.plans import Plans, load_plans
from toolcrew.workers.sandboxd.runtime.apparmor import NO_PROFILE
from toolcrew.workers.sandboxd.runtime.engines import ContainerEngine, open_engine

_KILLED_S: Final = 3600.0


async def examine(settings: SandboxdSettings, plans: Plans, engine: ContainerEngine) -> Evidence:
    """Collect all evidence about the host. Missing parts raise no exception, because they are evidence too."""
    evidence = Evidence(settings, read_host_facts(), plans, egress_problem=await _find_egress_problem(settings, plans))
    try:
        evidence = replace(evidence, facts=await engine.facts())
        evidence = replace(evidence, images=await _find_images(plans, engine))
        return await _prove(settings, engine, evidence)
    except OperatorError as error:
        return replace(evidence, problem=str(error))
    except OSError as error:
        return replace(
            evidence,
            problem=(
                f"sandboxd's folders cannot be made: {error}; set TOOLCREW_SANDBOXD_STATE and TOOLCREW_SANDBOXD_LEASES"
            ),
        )


async def _find_images(plans: Plans, engine: ContainerEngine) -> Mapping[str, str | None]:
    return {image: await engine.image_id(image) for image in sorted(plans.local_images())}


async def _prove(settings: SandboxdSettings, engine: ContainerEngine, evidence: Evidence) -> Evidence:
    """Run the test sandbox of sandboxd's start. Add the workspaces and the way in which sandboxes are started to the
    evidence. Raises SandboxUnavailable with the guarantee that does not hold.
    """
    # Use a separate name and folder, so that no running sandboxd removes this sandbox as a leftover, and this check
    # removes none of theirs. The folder is on the disk that is examined.
    name = f"doctor-{secrets.token_hex(8)}"
    was_there = settings.state().exists()
    state = settings.state() / name
    await asyncio.to_thread(_clear_killed, settings.state())
    overrides = {"sandboxd_name": name, "sandboxd_state": state, "pool_size": 0}
    try:
        async with open_daemon(settings.model_copy(update=overrides), engine) as daemon:
            workspaces = daemon.choice.workspaces
            oci = daemon.setup.oci if daemon.setup.starts_by_oci else None
            return replace(
                evidence,
                workspaces=WorkspaceFacts(workspaces.kind, workspaces.is_hard, daemon.choice.note),
                own_runtime=oci.version if oci is not None else None,
                engine_start=daemon.setup.engine_start,
                unmapped=oci.unmapped if oci is not None else None,
                apparmor=oci.apparmor if oci is not None else NO_PROFILE,
            )
    finally:
        await asyncio.to_thread(shutil.rmtree, state, ignore_errors=True)
        if not was_there:
            with contextlib.suppress(OSError):  # another process has begun to use the folder
                settings.state().rmdir()


def _clear_killed(state: Path) -> None:
    """Remove the folders of checks that were killed. No check takes an hour."""
    for folder in state.glob("doctor-*"):
        with contextlib.suppress(OSError):  # another check has already removed the folder
            if folder.stat().st_mtime < time.time() - _KILLED_S:
                shutil.rmtree(folder)


async def _find_egress_problem(settings: SandboxdSettings, plans: Plans) -> str | None:
    """Return why the proxy cannot be used; None when it answers or no class needs it."""
    if all(tenant_class.network != "egress" for tenant_class in plans.classes.values()):
        return None
    path = settings.egress_socket
    assert path is not None  # Plans refuses a class with egress when the setting is missing
    try:
        _, writer = await connect_proxy(path, settings.proxy_uids())
    except OSError as error:
        return f"no proxy at {path} ({error})"
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    return None


def main() -> int:
    arguments = _parse_arguments()
    try:
        settings = read_environment(SandboxdSettings)
        # With `--check` log only errors: the table shows what the check finds.
        configure_logging("sandboxd", settings, "ERROR" if arguments.check else None)
        if arguments.check:
            return asyncio.run(_check(settings, as_json=arguments.json))
        asyncio.run(run(settings))
    except (OperatorError, OSError) as error:
        if arguments.check:
            sys.stderr.write(f"sandboxd: {error}\n")
        else:
            log_not_started("sandboxd", error)
        return 1
    return 0


def _parse_arguments() -> argparse.Namespace:
    """Parse the command line. An unknown argument ends the process, so that a misspelled `--check` does not start a
    daemon.
    """
    parser = argparse.ArgumentParser(
        "python -m toolcrew.workers.sandboxd", description="Serve sandboxes of this host until a signal."
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="only report what this host can guarantee; exit code 1 means that sandboxd would not start",
    )
    parser.add_argument("--json", action="store_true", help="print the report of --check as JSON")
    arguments = parser.parse_args()
    if arguments.json and not arguments.check:
        parser.error("--json was given without --check: add --check")
    return arguments


async def _check(settings: SandboxdSettings, *, as_json: bool) -> int:
    """Print the table of guarantees. Returns 1 when sandboxd would not start."""
    plans = load_plans(settings)
    try:
        with cancelled_by_signals(), contextlib.closing(await open_engine(settings)) as engine:
            evidence = await examine(settings, plans, engine)
    except asyncio.CancelledError:
        sys.stderr.write("sandboxd: a signal ended the check before it was complete\n")
        return 1
    rows = build_rows(evidence)
    sys.stdout.write(json.dumps(_build_report(evidence, rows)) + "\n" if as_json else "".join(map(_show, rows)))
    return 1 if any(row.is_needed and row.state == "broken" for row in rows) else 0


def _build_report(evidence: Evidence, rows: tuple[HostGuarantee, ...]) -> dict[str, Any]:
    """Return the report that `toolcrew doctor` reads."""
    facts, settings = evidence.facts, evidence.settings
    report: dict[str, Any] = {"image": settings.sandbox_image, "runtime": settings.sandbox_runtime}
    report["guarantees"] = [asdict(row) for row in rows]
    if facts is not None:
        report |= {
            "engine": f"{facts.product} {facts.version}",
            "kernel": facts.kernel,
            "cgroup": facts.cgroup_version,
            "seccomp": facts.seccomp,
            "runtimes": list(facts.runtimes),
            "components": dict(facts.components),
            "storage_driver": facts.storage_driver,
            "image_id": evidence.images.get(settings.sandbox_image),
        }
    return report | ({"problem": evidence.problem} if evidence.problem is not None else {})


def _show(row: HostGuarantee) -> str:
    remedy = f"\n         do: {row.remedy}" if row.state != "holds" and row.remedy else ""
    return f"{row.state:<7}  {row.name}: {row.why}{remedy}\n"
