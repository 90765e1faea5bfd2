"""Options of `toolcrew batches submit`, checked before any item is queued."""

import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import cast

import typer
from pydantic import ValidationError

from toolcrew.contract.errors import ConfigError
from toolcrew.contract.invalid_input import describe_invalid
from toolcrew.contract.run_events import FailureKind
from toolcrew.contract.run_spec import DIALECT_NAMES, PROFILE_NAMES, DialectName, ProfileName, RunBody, RunLimits
from toolcrew.contract.session_spec import DEFAULT_OPTIONS, SandboxOptions
from toolcrew.contract.settings import OrchestratorSettings
from toolcrew.contract.webhooks import Webhook
from toolcrew.orchestrator.batches.lines import BatchFile
from toolcrew.orchestrator.models.choice import FALLBACK_WARNING, LOCAL, find_shipped, serves_model
from toolcrew.store.batches import BatchDefaults, BatchItem


def build_defaults(
    limits: RunLimits,
    *,
    prices: str | None,
    model: str | None,
    dialect: str | None,
    profile: str | None,
    retries: int,
    artifacts: Path | None,
    options: SandboxOptions | None = None,
    asks_people: bool = False,
) -> BatchDefaults:
    """Return the defaults for lines of a batch. Raises BadParameter."""
    prompt, completion = parse_prices(prices)
    check_format(dialect, profile)
    return BatchDefaults(
        model=model,
        dialect=cast(DialectName | None, dialect),
        profile=cast(ProfileName | None, profile),
        limits=limits,
        prompt_price=prompt,
        completion_price=completion,
        retries=retries,
        options=options or DEFAULT_OPTIONS,
        artifacts=str(artifacts.resolve()) if artifacts is not None else None,
        asks_people=asks_people,
    )


def check_format(dialect: str | None, profile: str | None) -> None:
    """Raise BadParameter for an unknown dialect or profile."""
    if dialect is not None and dialect not in DIALECT_NAMES:
        raise typer.BadParameter(
            f"--dialect {dialect} is unknown: use {', '.join(DIALECT_NAMES[:-1])} or {DIALECT_NAMES[-1]}"
        )
    if profile not in (None, *PROFILE_NAMES):
        raise typer.BadParameter(f"--profile {profile} is unknown: use one of {', '.join(PROFILE_NAMES)}")


def parse_webhook(url: str | None, secret: Path | None, *, is_detached: bool) -> Webhook | None:
    """Return the webhook that is called at the end of the batch. `secret`: a file with the webhook's secret, because
    other users of the machine can read command arguments.

    Raises BadParameter.
    """
    if url is None and secret is None:
        return None
    if url is None or secret is None:
        raise typer.BadParameter("--webhook and --webhook-secret belong together: give both")
    if not is_detached:
        raise typer.BadParameter("--webhook needs --detach: this command itself waits for the end of its batch")
    try:
        return Webhook(url=url, secret=secret.read_text(encoding="utf-8").strip())
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(
            f"--webhook-secret {secret} cannot be read: {error}; name a readable text file"
        ) from error
    except ValidationError as error:
        raise typer.BadParameter(f"the webhook is invalid: {describe_invalid(error)}; correct it") from None


def check_lines(file: BatchFile, defaults: BatchDefaults, *, is_detached: bool = False) -> None:
    """Raise ConfigError unless every option that the lines need is set. Without this check, each item would fail
    later.
    """
    items_with_artifacts = [item for item in file.items if item.environment.artifacts]
    if items_with_artifacts and defaults.artifacts is None and not is_detached:
        raise ConfigError(
            f"{_format_subject(items_with_artifacts)} artifacts, but no folder is set: give --artifacts FOLDER, or "
            "remove `artifacts` from the lines"
        )


def build_model_test(settings: OrchestratorSettings, *, is_detached: bool) -> Callable[[str], bool]:
    """Return a function that returns whether the batch can use a model without a configured endpoint. Only the
    orchestrators of a detached batch know their own models, but none of them starts the local model for a line.
    """
    if is_detached:
        return lambda name: name != LOCAL
    return lambda name: name == LOCAL or serves_model(settings, name)


def find_model_warnings(file: BatchFile, defaults: BatchDefaults, settings: OrchestratorSettings) -> list[str]:
    """Return warnings about the models that this process will use for the lines. Raises ConfigError for an
    ambiguous name.
    """
    names = {item.work.model or defaults.model for item in file.items if isinstance(item.work, RunBody)}
    shipped = {name: find_shipped(settings, name) for name in names}
    return [FALLBACK_WARNING] if settings.model is None and shipped.get(None) is not None else []


def prepare_artifacts(folder: Path) -> None:
    """Create the folder. Raises ConfigError if it is not writable."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"artifacts cannot be written to {folder} ({error.strerror or error}): give another folder with --artifacts"
        ) from error


def parse_prices(text: str | None) -> tuple[float | None, float | None]:
    """Return the prices of a million prompt and completion tokens. Raises BadParameter."""
    if text is None:
        return None, None
    try:
        prompt, completion = (float(part) for part in text.split("/"))
    except ValueError:
        prompt = completion = math.nan
    if not (0 <= prompt < math.inf and 0 <= completion < math.inf):
        raise typer.BadParameter(
            "--prices is not IN/OUT: give the prices of a million tokens, such as 0.15/0.60, each at least 0"
        )
    return prompt, completion


def parse_kinds(text: str) -> list[FailureKind]:
    """Return the kinds of failure in a list with commas. Raises BadParameter."""
    if text.strip() == "all":
        return list(FailureKind)
    try:
        return [FailureKind(part.strip()) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(
            f"--retry: unknown kind of failure. Give one or more of {', '.join(FailureKind)}, with commas, or all"
        ) from None


def _format_subject(items: list[BatchItem]) -> str:
    first = f"line {items[0].line}"
    return f"{first} names" if len(items) == 1 else f"{len(items)} lines name, the first of them {first},"
