"""What the flags of `toolcrew batch` say, checked before anything of a batch is queued."""

import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import typer

from contract.errors import ConfigError
from contract.run_events import FailureKind
from orchestrator.batches.lines import BatchFile
from orchestrator.models.choice import FALLBACK_WARNING, find_shipped
from orchestrator.settings import OrchestratorSettings
from store.batches import BatchDefaults, BatchItem, RunBody, RunLimits

DIALECTS = tuple(name for kind in get_args(RunBody.model_fields["dialect"].annotation) for name in get_args(kind))


@dataclass(frozen=True)
class GivenLimits:
    """The flags of `submit` that are limits, as they were typed."""

    max_iterations: int | None = None
    max_wall: float | None = None
    max_tokens: int | None = None
    max_cost: float | None = None
    prices: str | None = None


def build_defaults(
    given: GivenLimits,
    *,
    model: str | None,
    dialect: str | None,
    retries: int,
    artifacts: Path | None,
    asks_people: bool = False,
) -> BatchDefaults:
    """What the lines of a batch do not say. Raises BadParameter."""
    prompt, completion = parse_prices(given.prices)
    if given.max_cost is not None and prompt is None:
        raise typer.BadParameter("--max-cost needs --prices IN/OUT: without prices nothing is known of the cost")
    if dialect is not None and dialect not in DIALECTS:
        raise typer.BadParameter(f"--dialect is {', '.join(DIALECTS[:-1])} or {DIALECTS[-1]}, not '{dialect}'")
    return BatchDefaults(
        model=model,
        dialect=dialect,
        limits=RunLimits(
            max_iterations=given.max_iterations,
            max_wall_s=_above_zero("--max-wall", given.max_wall),
            max_tokens=given.max_tokens,
            max_cost=_above_zero("--max-cost", given.max_cost),
        ),
        prompt_price=prompt,
        completion_price=completion,
        retries=retries,
        artifacts=str(artifacts.resolve()) if artifacts is not None else None,
        asks_people=asks_people,
    )


def check_lines(file: BatchFile, defaults: BatchDefaults, *, is_detached: bool = False) -> None:
    """Raises ConfigError when lines ask for what the flags do not give: told now, and not once for each of them at
    their ends.
    """
    costly = [item for item in file.items if isinstance(item.work, RunBody) and item.work.limits.max_cost is not None]
    if costly and defaults.prompt_price is None:
        raise ConfigError(
            f"{_told(costly)} a max_cost, and no prices are known: give --prices IN/OUT, what a million tokens cost"
        )
    asking = [item for item in file.items if item.ground.artifacts]
    if asking and defaults.artifacts is None and not is_detached:
        raise ConfigError(f"{_told(asking)} artifacts: give --artifacts FOLDER, or take `artifacts` out of the lines")


def check_models(file: BatchFile, defaults: BatchDefaults, settings: OrchestratorSettings) -> list[str]:
    """Return warnings about the models that this process will use for the lines. Raises ConfigError for a name that
    could mean two of them.
    """
    names = {item.work.model or defaults.model for item in file.items if isinstance(item.work, RunBody)}
    shipped = {name: find_shipped(settings, name) for name in names}
    return [FALLBACK_WARNING] if settings.model is None and shipped.get(None) is not None else []


def prepare_artifacts(folder: Path) -> None:
    """Make the folder. Raises ConfigError when nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"artifacts cannot be written to {folder} ({error.strerror or error}): give another folder with --artifacts"
        ) from error


def parse_prices(text: str | None) -> tuple[float | None, float | None]:
    """Of a million tokens in and out. Raises BadParameter."""
    if text is None:
        return None, None
    try:
        prompt, completion = (float(part) for part in text.split("/"))
    except ValueError:
        prompt = completion = math.nan
    if not (0 <= prompt < math.inf and 0 <= completion < math.inf):
        raise typer.BadParameter("--prices is IN/OUT, as 0.15/0.60: what a million tokens cost, each at least 0")
    return prompt, completion


def parse_kinds(text: str) -> list[FailureKind]:
    """Kinds of failure. Raises BadParameter."""
    if text.strip() == "all":
        return list(FailureKind)
    try:
        return [FailureKind(part.strip()) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(
            f"--retry is one or more of {', '.join(FailureKind)}, with commas between, or all"
        ) from None


def _above_zero(flag: str, value: float | None) -> float | None:
    if value is not None and not 0 < value < math.inf:
        raise typer.BadParameter(f"{flag} is a number above 0, not {value:g}")
    return value


def _told(items: list[BatchItem]) -> str:
    first = f"line {items[0].line}"
    return f"{first} names" if len(items) == 1 else f"{len(items)} lines name, the first of them {first},"
