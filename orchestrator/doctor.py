"""What this host can promise, and how to mend what is missing: engine, sandboxes, Redis, workers, model."""

import asyncio
import importlib.util
import json
import platform
from dataclasses import dataclass, field
from typing import Any

from contract.errors import ConfigError, OperatorError
from orchestrator.catalog import STARTED_BY, RedisCatalog
from orchestrator.models.weights import load_weights
from orchestrator.redis_connection import check_redis, open_redis
from orchestrator.redis_server import find_redis_server
from orchestrator.settings import OrchestratorSettings, child_environment, python

CHECK_TIMEOUT_S = 60.0
CHECK_END_S = 10.0
"""How long a check that was ended may take to remove what it had made."""


@dataclass(frozen=True)
class Finding:
    """One thing looked at. `needed` False: something still works without it."""

    name: str
    is_good: bool
    text: str
    needed: bool = True


@dataclass
class Report:
    """All findings, in the order of looking; and the table of what sandboxes of this host promise, as sandboxd's check gives it.

    A row of it has `name`, `state` (holds, void, unknown), `why`, `remedy` and `is_needed`.
    """

    findings: list[Finding] = field(default_factory=list)
    promises: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_healthy(self) -> bool:
        void = any(row["is_needed"] and row["state"] == "void" for row in self.promises)
        return not void and all(finding.is_good for finding in self.findings if finding.needed)

    def add(self, name: str, is_good: bool, text: str, *, needed: bool = True) -> None:
        self.findings.append(Finding(name, is_good, text, needed))

    def lines(self) -> list[str]:
        """One line a finding."""
        marks = {(True, True): "ok  ", (True, False): "ok  ", (False, True): "FAIL", (False, False): "note"}
        return [f"{marks[(f.is_good, f.needed)]}  {f.name:<8}  {f.text}" for f in self.findings]

    def promise_lines(self) -> list[str]:
        """The table of promises; below each that does not hold, what to do."""
        width = max((len(str(row["name"])) for row in self.promises), default=0)
        lines = ["", "what sandboxes of this host promise"] if self.promises else []
        for row in self.promises:
            lines.append(f"{row['state']:<7}  {row['name']:<{width}}  {row['why']}")
            if row["state"] != "holds" and row["remedy"]:
                lines.append(f"{'':<7}  {'':<{width}}  -> {row['remedy']}")
        return lines

    def to_json(self) -> dict[str, Any]:
        return {"healthy": self.is_healthy, "findings": [vars(finding) for finding in self.findings], "promises": self.promises}


async def examine(settings: OrchestratorSettings) -> Report:
    """Look at everything once; starts and removes one sandbox to prove the profile."""
    report = Report()
    report.add("python", True, platform.python_version())
    await _examine_engine(report)
    await _examine_redis(settings, report)
    await _examine_model(settings, report)
    return report


async def _examine_engine(report: Report) -> None:
    """sandboxd's own check in a process of its own: this side never talks to the engine."""
    process = await asyncio.create_subprocess_exec(
        python(),
        "-m",
        "workers.sandboxd",
        "--check",
        "--json",
        env=child_environment({}),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(CHECK_TIMEOUT_S):
            out, err = await process.communicate()
    except TimeoutError:
        await _end(process)
        report.add("engine", False, f"the check of engine and sandbox was not done within {CHECK_TIMEOUT_S:g} s: restart the Docker engine")
        return
    try:
        facts = json.loads(out)
    except ValueError:
        report.add("engine", False, err.decode(errors="replace").strip()[-300:] or "the check said nothing")
        return
    report.promises = list(facts["promises"])
    if "engine" in facts:
        report.add("engine", True, f"Docker {facts['engine']}, runtimes {', '.join(facts['runtimes'])}")
        report.add(
            "kernel", bool(facts["seccomp"]), f"{facts['kernel']}, cgroup v{facts['cgroup']}, seccomp {'on' if facts['seccomp'] else 'off'}"
        )
        report.add(
            "image",
            facts.get("image_id") is not None,
            f"{facts['image']}{'' if facts.get('image_id') else ': build it with scripts/build-image'}",
        )
    if "problem" in facts:
        report.add("sandbox", False, str(facts["problem"]))
    else:
        report.add("sandbox", True, f"the profile holds under {facts['runtime']}: a sandbox was started, inspected and removed")


async def _end(process: asyncio.subprocess.Process) -> None:
    """In order, so that no sandbox and no folder of the check stays; outright when that takes too long."""
    process.terminate()
    try:
        async with asyncio.timeout(CHECK_END_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


async def _examine_redis(settings: OrchestratorSettings, report: Report) -> None:
    try:
        if settings.redis_url is None:
            report.add("redis", True, f"TOOLCREW_REDIS_URL is not set; embedded stacks use {find_redis_server()}")
            return
        broker = settings.broker()
        client = open_redis(broker)
        try:
            await check_redis(client, broker)
            broker.signing_keys()
            report.add("redis", True, broker.redis_address())
            await examine_workers(RedisCatalog(client, broker.deployment), report)
        finally:
            await client.aclose()
    except OperatorError as error:
        report.add("redis", False, str(error))


async def examine_workers(catalog: RedisCatalog, report: Report) -> None:
    """Who serves calls now. Nobody need: workers may be started after this look."""
    try:
        pools = await catalog.pools()
    except ConfigError as error:
        report.add("workers", False, str(error))
        return
    for pool, start in STARTED_BY.items():
        served = [spec.name for spec in pools.get(pool, ()) if spec.audience == "model"]
        text = f"{pool}: {', '.join(served) or 'no tools'}" if pool in pools else f"{pool}: no worker; start one with {start}"
        report.add("workers", pool in pools, text, needed=False)


async def _examine_model(settings: OrchestratorSettings, report: Report) -> None:
    if settings.openai_base_url or settings.openai_api_key:
        named = settings.model is not None
        text = (
            f"{settings.model} at {settings.openai_base_url or 'the OpenAI API'}"
            if named
            else "an endpoint is set but TOOLCREW_MODEL is not"
        )
        report.add("model", named, text)
        return
    try:
        weights = await asyncio.to_thread(load_weights, user_file=settings.model_file, cache_dir=settings.model_cache, hub_url=None)
    except ConfigError:
        text = "no endpoint and no weights of the local model: set OPENAI_BASE_URL and TOOLCREW_MODEL, or see docs/local-model.md"
        report.add("model", False, text, needed=False)
        return
    has_server = importlib.util.find_spec("xllamacpp") is not None
    text = (
        f"the embedded local model, {weights}"
        if has_server
        else "weights are here but not their server: pip install 'toolcrew[local-model]'"
    )
    report.add("model", has_server, text, needed=False)
