"""Measure how often a batch of many images finds the image of a line on the host that runs the line.

Each host has its own Docker engine and room for a part of the images; the registry counts the pulls. The same lines
run once with a placement that ignores images and once with the product's.
"""

import asyncio
import contextlib
import io
import json
import random
import secrets
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import redis.asyncio
from pydantic import SecretStr

from benchmarks.engine_peer import open_api
from benchmarks.image_hosts import new_deployment, push_image, running_host
from benchmarks.processes import child_process, temporary_folder
from benchmarks.report import Report
from benchmarks.sizes import size
from tests.support.sandboxd.image_registry import ImageRegistry, open_registry
from toolcrew.contract.broker import BrokerSettings
from toolcrew.contract.errors import BrokerUnavailable, SandboxUnavailable
from toolcrew.contract.hosts import HostReport
from toolcrew.contract.settings import OrchestratorSettings
from toolcrew.orchestrator.batches.displays import JsonLines
from toolcrew.orchestrator.batches.lines import load_lines
from toolcrew.orchestrator.dispatch import session_locator
from toolcrew.orchestrator.dispatch.placement import HostRequirements, choose_host
from toolcrew.orchestrator.operations.ports import reserve_port
from toolcrew.orchestrator.operations.redis_server import find_redis_server, write_redis_config
from toolcrew.orchestrator.runs.client_batches import RowPaths
from toolcrew.orchestrator.sdk.client import ToolClient
from toolcrew.store.connection import check_redis, open_redis
from toolcrew.store.hosts import HostStore

SEED = 4
HOSTS, IMAGES, LINES = size((4, 200, 400), (2, 8, 8))
ROOM = IMAGES // 4 // HOSTS
"""Number of images for which one host has room. All hosts together have room for a quarter of the images."""
IMAGE_BYTES = 300 * 1024
AT_A_TIME = size(8, 2)
READY_S = 60.0


@contextlib.asynccontextmanager
async def open_broker() -> AsyncIterator[BrokerSettings]:
    """Start a Redis server and yield its settings when the server answers."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="toolcrew-bench-")))
        port, password = reserve_port(), secrets.token_hex(8)
        config = write_redis_config(folder, port, password)
        stack.enter_context(child_process([find_redis_server(), str(config)], {}, folder / "redis.log"))
        broker = BrokerSettings(redis_url=SecretStr(f"redis://:{password}@127.0.0.1:{port}/0"))
        client = open_redis(broker)
        try:
            await _until_up(client, broker)
        finally:
            await client.aclose()
        yield broker


async def _until_up(client: "redis.asyncio.Redis", broker: BrokerSettings) -> None:
    until = time.monotonic() + 20
    while True:
        try:
            return await check_redis(client, broker)
        except BrokerUnavailable:
            if time.monotonic() > until:
                raise
            await asyncio.sleep(0.05)


@dataclass(frozen=True)
class PlacementResult:
    """Result of one batch. `pulls`: number of pulls of each image. `right`: number of lines whose sandbox had the files
    of the line's image.
    """

    pulls: Counter[str]
    right: int
    seconds: float

    @property
    def hits(self) -> int:
        return LINES - self.pulls.total()


def run() -> Report:
    for program in ("dockerd", "docker-registry"):
        if shutil.which(program) is None:
            raise SandboxUnavailable(f"this benchmark needs {program}: apt-get install docker.io docker-registry")
    with contextlib.ExitStack() as stack:
        # The data is in memory: a disk that discards freed blocks takes minutes to remove the layers of the engines.
        folder = stack.enter_context(temporary_folder("/dev/shm"))
        api = open_api()
        stack.callback(api.close)
        registry = stack.enter_context(open_registry(api, folder))
        return asyncio.run(_run(registry, folder))


async def _run(registry: ImageRegistry, folder: Path) -> Report:
    async with contextlib.AsyncExitStack() as stack:
        broker = (await stack.enter_async_context(open_broker())).model_copy(update={"deployment": new_deployment()})
        shared = {
            "TOOLCREW_DEPLOYMENT": broker.deployment,
            "TOOLCREW_REDIS_URL": broker.redis_url.get_secret_value(),
            "TOOLCREW_SANDBOX_IMAGES_ALLOWED": json.dumps([f"{registry.repository}/*"]),
        }
        # The budget has half an image more, because the engine counts more than the files.
        own = {"TOOLCREW_IMAGE_CACHE_BYTES": str(IMAGE_BYTES * ROOM + IMAGE_BYTES // 2), "TOOLCREW_REDIS_URL": ""}
        hosts = [running_host(f"host-{at}", folder / f"host-{at}", shared, own) for at in range(HOSTS)]
        for host in hosts:
            stack.enter_context(host)
        settings = OrchestratorSettings(redis_url=broker.redis_url, deployment=broker.deployment)
        redis = open_redis(broker)
        stack.push_async_callback(redis.aclose)
        await _wait_ready(HostStore(redis, broker.deployment))
        client = await stack.enter_async_context(ToolClient.connect(settings=settings))
        with _ignoring_images():
            ignoring = await _work(client, registry, folder, "ignoring")
        chosen = await _work(client, registry, folder, "chosen")
    return _report(ignoring, chosen)


async def _wait_ready(hosts: HostStore) -> None:
    until = time.monotonic() + READY_S
    while len(await hosts.reports()) < HOSTS:
        if time.monotonic() > until:
            raise SandboxUnavailable(f"the workers did not report within {READY_S:g} s")
        await asyncio.sleep(0.2)


@contextlib.contextmanager
def _ignoring_images() -> Iterator[None]:
    """Choose hosts as if no session named an image."""

    def choose(reports: Sequence[HostReport], needs: HostRequirements, **options: Any) -> HostReport:
        return choose_host(reports, replace(needs, image=None), **options)

    vars(session_locator)["choose_host"] = choose
    try:
        yield
    finally:
        vars(session_locator)["choose_host"] = choose_host


async def _work(client: ToolClient, registry: ImageRegistry, folder: Path, name: str) -> PlacementResult:
    """Run the lines over new images. Each image has the same number of lines, in a random order."""
    chance, marks = random.Random(SEED), {f"{name}-{at}": secrets.token_hex(8) for at in range(IMAGES)}
    address, _, team = registry.repository.partition("/")
    images = {
        push_image(address, f"{team}/{short}", {"mark": mark.encode(), "rest": secrets.token_bytes(IMAGE_BYTES)}): mark
        for short, mark in marks.items()
    }
    order = list(images) * (LINES // IMAGES)
    chance.shuffle(order)
    path, out = folder / f"{name}.jsonl", folder / f"{name}-out.jsonl"
    call = {"tool": "bash_tool", "arguments": {"command": 'echo "$(</mark)"'}}
    path.write_text(
        "".join(json.dumps({"id": f"i{at}", "image": image, **call}) + "\n" for at, image in enumerate(order))
    )
    file, runs = load_lines(path), client.batch_runs(has_traces=False)
    began = time.monotonic()
    with runs.open_rows(RowPaths(out), name, file) as rows:
        await runs.batches.submit(file, batch=name, concurrency=AT_A_TIME)
        await runs.work(name, lambda watched: JsonLines(watched, io.StringIO()), rows=rows)
    seconds = time.monotonic() - began
    answers = {row["custom_id"]: json.dumps(row) for row in map(json.loads, out.read_text().splitlines())}
    right = sum(images[image] in answers.get(f"i{at}", "") for at, image in enumerate(order))
    return PlacementResult(Counter({image: registry.count_pulls(image) for image in images}), right, seconds)


def _report(ignoring: PlacementResult, chosen: PlacementResult) -> Report:
    report = Report(
        "image_placement",
        notes=[
            f"{LINES} lines in a random order over {IMAGES} images of {IMAGE_BYTES // 1024} KiB, {AT_A_TIME} at a time",
            f"{HOSTS} hosts with an engine each and room for {ROOM} images",
        ],
    )
    report.add("right_number", chosen.right, f"of {LINES} lines: right results", at_least=LINES)
    report.add("pulls_most_number", max(chosen.pulls.values()), "pulls of one image at most", at_most=2)
    report.add("pulls_number", chosen.pulls.total(), "pulls")
    report.add("hit_ratio", chosen.hits / LINES, "lines whose host had the image")
    report.add("ignoring_hit_ratio", ignoring.hits / LINES, "the same with a placement that ignores images")
    gain = chosen.hits / max(1, ignoring.hits)
    report.add("hit_gain_ratio", gain, "the first / the second", at_least=2.0)
    report.add("lines_per_s", LINES / chosen.seconds, "lines")
    report.add("ignoring_lines_per_s", LINES / ignoring.seconds, "lines with a placement that ignores images")
    return report
