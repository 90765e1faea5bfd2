"""Check the models and the prices of a batch before it is submitted."""

from collections.abc import Collection

from contract.errors import ErrorCode, ToolFailure
from orchestrator.batches.lines import BatchFile
from store.batches import BatchDefaults, RunBody


def models_of(file: BatchFile, defaults: BatchDefaults) -> set[str]:
    """Return the names of models in the lines and the defaults."""
    names = {item.work.model or defaults.model for item in file.items if isinstance(item.work, RunBody)}
    return {name for name in names if name is not None}


def check_prices(file: BatchFile, defaults: BatchDefaults, default_model: str | None, priced: Collection[str]) -> None:
    """Raise ToolFailure(INVALID_ARGUMENTS) for a line with a cost limit whose model has no prices. Without this check,
    each item of such a line would fail later. `priced`: names of models with prices. `default_model`: the model of
    lines that name none.
    """
    if defaults.prompt_price is not None:
        return
    for item in file.items:
        if not isinstance(item.work, RunBody) or (item.work.limits.max_cost or defaults.limits.max_cost) is None:
            continue
        if (item.work.model or defaults.model or default_model) not in priced:
            raise ToolFailure(
                ErrorCode.INVALID_ARGUMENTS,
                f"line {item.line} has a max_cost, but no prices are set: give --prices IN/OUT, the prices of a "
                "million tokens, or set them at its model endpoint (toolcrew models set NAME)",
            )
