"""Checks of `toolcrew doctor` for services around a deployment: Flower, the API, the model's endpoint, the collector
of spans, the folder of traces.
"""

import asyncio
import importlib.util
import json
import os
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from toolcrew.contract.errors import ConfigError
from toolcrew.contract.settings import DEFAULT_ENDPOINT, OrchestratorSettings, load_tracing_settings
from toolcrew.contract.signing import SigningKeys
from toolcrew.orchestrator.models.weights import load_weights
from toolcrew.orchestrator.operations.findings import Report
from toolcrew.store.connection import RedisClient
from toolcrew.store.model_endpoints import ModelEndpoints
from toolcrew.store.secrets import SecretStore, advise_setting

ANSWER_S = 5.0
MAX_ANSWER_BYTES = 4 * 1024 * 1024


async def examine_pages(settings: OrchestratorSettings, report: Report) -> None:
    """Check Flower and the API at their configured addresses."""
    await _examine_url("flower", settings.flower_url, "/healthcheck", "TOOLCREW_FLOWER_URL", report)
    await _examine_url("api", settings.page_url, "/readyz", "TOOLCREW_PAGE_URL", report)


async def _examine_url(name: str, base: str | None, path: str, variable: str, report: Report) -> None:
    if base is None:
        # The API reads its own environment, which may have the variable.
        report.add(name, True, f"{variable} is not set here, so it was not asked", needed=False)
        return
    status, body = await asyncio.to_thread(_get, base.rstrip("/") + path, None)
    if status == 200:
        report.add_passed(name, f"{base} answers")
    elif status == 503 and name == "api":
        report.add_failure(
            name,
            f"{base} is not ready: {_checks_of(body)}",
            "see its log, and the lines of this report about Redis and workers",
        )
    elif status in (401, 403) or 300 <= status < 400:
        report.add_passed(name, f"{base} answers, and asks for a login")
    else:
        problem = f"answers with {status}" if status else f"does not answer ({body.decode(errors='replace')})"
        report.add_failure(name, f"{base} {problem}", f"start it, or correct {variable}")


def _checks_of(body: bytes) -> str:
    try:
        checks = json.loads(body)["checks"]
        return "; ".join(f"{name}: {state}" for name, state in checks.items() if state != "ok")[:500]
    except (ValueError, KeyError, TypeError, AttributeError):
        return "the response contains no reason"


def _get(url: str, key: str | None) -> tuple[int, bytes]:
    """Return status and body; 0 and the reason when nothing answers. The request bypasses the environment's proxies,
    which are for external addresses. It follows no redirect, because the key must not be sent to another address.
    """
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        with httpx.stream("GET", url, headers=headers, timeout=ANSWER_S, trust_env=False) as response:
            body = b""
            for piece in response.iter_bytes():
                body += piece
                if len(body) >= MAX_ANSWER_BYTES:
                    break
            return response.status_code, body
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        return 0, (str(error) or type(error).__name__).encode()


async def examine_model(settings: OrchestratorSettings, report: Report) -> None:
    """Check the configured endpoint, or the embedded model."""
    if settings.openai_base_url or settings.openai_api_key:
        await _examine_endpoint(settings, report)
        return
    try:
        weights = await asyncio.to_thread(
            load_weights, user_file=settings.model_file, cache_dir=settings.model_folder, hub_url=None
        )
    except ConfigError:
        text = (
            "no model endpoint is set, and the weights of the local model are missing: set OPENAI_BASE_URL and "
            "TOOLCREW_MODEL, or see docs/agents.md"
        )
        report.add("model", False, text, needed=False)
        return
    has_server = importlib.util.find_spec("xllamacpp") is not None
    text = (
        f"the embedded local model, {weights}"
        if has_server
        else "the weights are present but their server is missing: pip install 'toolcrew[local-model]'"
    )
    report.add("model", has_server, text, needed=False)


async def _examine_endpoint(settings: OrchestratorSettings, report: Report) -> None:
    """Check the endpoint with the list of models, which is free. The OpenAI API itself is not checked, because it may
    be behind a proxy.
    """
    if settings.model is None:
        report.add("model", False, "an endpoint is set but TOOLCREW_MODEL is not: set it")
        return
    if settings.openai_base_url is None:
        report.add_passed("model", f"{settings.model} at the OpenAI API")
        return
    key = settings.openai_api_key.get_secret_value() if settings.openai_api_key is not None else None
    advice = ("OPENAI_BASE_URL", "OPENAI_API_KEY", "TOOLCREW_MODEL")
    await _ask_server("model", settings.model, settings.openai_base_url, key, advice, report)


async def _ask_server(
    row: str, model: str, base_url: str, key: str | None, advice: tuple[str, str, str], report: Report
) -> None:
    """Add the row of a model server. `advice`: the settings of its address, its key and its model."""
    base = base_url.rstrip("/")
    status, body = await asyncio.to_thread(_get, f"{base}/models", key)
    name = f"{model} at {_without_login(base)}"
    if status == 0:
        text = f"{name}: it does not answer ({body.decode(errors='replace')})"
        report.add_failure(row, text, f"start it, or correct {advice[0]}")
    elif status in (401, 403):
        report.add_failure(row, f"{name}: it refuses the key", f"correct {advice[1]}")
    elif status == 200 and (listed := _names_of(body)) and model not in listed:
        some = ", ".join(sorted(listed)[:5])
        report.add_warning(row, f"{name}: it does not list that model", f"check {advice[2]}; it lists {some}")
    elif status >= 500:
        report.add_failure(row, f"{name}: it answers with {status}", "see its log")
    else:
        report.add_passed(row, name)


async def examine_model_endpoints(client: RedisClient, deployment: str, keys: SigningKeys, report: Report) -> None:
    """Check every configured endpoint of the deployment and of its tenants. Raises BrokerUnavailable."""
    secrets = SecretStore(client, deployment, keys)
    for field, endpoint in (await ModelEndpoints(client, deployment, keys).all()).items():
        row, owner = f"model {field}", field.rpartition("/")[0] or None
        if isinstance(endpoint, ConfigError):
            report.add(row, False, str(endpoint))
            continue
        secret = None
        if endpoint.secret is not None:
            try:
                secret = await secrets.get(owner, endpoint.secret)
            except ConfigError as error:
                report.add(row, False, str(error))
                continue
            if secret is None:
                advice_to_set = advise_setting(owner, endpoint.secret)
                report.add_failure(row, f"its secret {endpoint.secret} does not exist", advice_to_set)
                continue
        advice = ("its --url", f"the secret {endpoint.secret}", "its --model")
        key = secret.value if secret is not None else None
        await _ask_server(row, endpoint.model, endpoint.base_url, key, advice, report)


def _names_of(body: bytes) -> set[str]:
    try:
        return {str(model["id"])[:200] for model in json.loads(body)["data"]}
    except (ValueError, KeyError, TypeError, RecursionError):
        return set()


def _without_login(url: str) -> str:
    parts = urlsplit(url)
    return url.replace(parts.netloc, parts.netloc.rpartition("@")[2], 1)


async def examine_tracing(settings: OrchestratorSettings, report: Report) -> None:
    """Check that spans can be sent and traces can be written."""
    try:
        tracing = load_tracing_settings()
    except ConfigError as error:
        report.add("tracing", False, str(error))
    else:
        if not tracing.is_on:
            report.add_passed("tracing", "off")
        elif importlib.util.find_spec("opentelemetry") is None:
            report.add_failure(
                "tracing",
                "TOOLCREW_TRACING is set, and OpenTelemetry is not installed",
                "pip install 'toolcrew[ops]', or unset it",
            )
        else:
            await _examine_collector(tracing.endpoint or DEFAULT_ENDPOINT, report)
    folder = _nearest(settings.traces)
    if os.access(folder, os.W_OK | os.X_OK):
        report.add_passed("traces", f"written below {settings.traces}")
    else:
        report.add_warning("traces", f"{settings.traces} cannot be written", "set TOOLCREW_TRACES to another folder")


def _nearest(path: Path) -> Path:
    """Return the folder, or its nearest parent that exists."""
    return next((folder for folder in (path, *path.parents) if folder.is_dir()), Path("/"))


async def _examine_collector(endpoint: str, report: Report) -> None:
    problem = await _connect(endpoint)
    name = _without_login(endpoint)
    if problem is None:
        report.add_passed("tracing", f"spans go to {name}, which answers")
    else:
        report.add_warning(
            "tracing",
            f"spans go to {name}, which does not answer ({problem})",
            "start the collector, or correct OTEL_EXPORTER_OTLP_ENDPOINT",
        )


async def _connect(endpoint: str) -> str | None:
    """Return why there is no connection; None if there is one."""
    try:
        parts = urlsplit(endpoint)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        async with asyncio.timeout(ANSWER_S):
            _, writer = await asyncio.open_connection(parts.hostname or "", port)
        writer.close()
        return None
    except (OSError, ValueError) as error:
        return str(error) or type(error).__name__
