"""Check the models and the prices of a batch before it is submitted."""

from collections.abc import Collection, Iterator, Mapping

from toolcrew.contract.run_spec import RunBody
from toolcrew.orchestrator.batches.lines import MAX_SHOWN, BadBatch, BatchFile, LineError
from toolcrew.store.batches import BatchDefaults, BatchItem


def find_models(file: BatchFile, defaults: BatchDefaults) -> dict[str, int | None]:
    """Return the names of models that the runs of a file use, and the first line that names each. None instead of a
    line: the defaults name the model.
    """
    found: dict[str, int | None] = {}
    for item, work in _runs(file):
        name = work.model or defaults.model
        if name is not None:
            found.setdefault(name, item.line if work.model is not None else None)
    return found


def check_models(
    file: BatchFile,
    name: str,
    defaults: BatchDefaults,
    refused: Mapping[str, str],
    default_model: str | None,
    priced: Collection[str],
) -> None:
    """Raise BadBatch for models that the runs of the file cannot use, and for lines with a cost limit whose model has
    no prices. Without this check, each item of such a line would fail later.

    `name`: name of the file in messages. `refused`: the models that cannot be used, and why. `default_model`: the model
    of lines that name none. `priced`: names of models with prices.
    """
    models = find_models(file, defaults)
    errors = [LineError(reason, models[model]) for model, reason in refused.items()]
    errors += _find_price_errors(file, defaults, default_model, priced)
    if errors:
        errors.sort(key=lambda error: error.line or 0)
        raise BadBatch(name, errors[:MAX_SHOWN], max(0, len(errors) - MAX_SHOWN), file)


def _find_price_errors(
    file: BatchFile, defaults: BatchDefaults, default_model: str | None, priced: Collection[str]
) -> Iterator[LineError]:
    if defaults.prompt_price is not None:
        return
    for item, work in _runs(file):
        has_limit = (work.limits.max_cost or defaults.limits.max_cost) is not None
        if has_limit and (work.model or defaults.model or default_model) not in priced:
            yield LineError(
                "`limits.max_cost` needs a model with prices: name one (GET /v1/models, `toolcrew models list`), omit "
                "the limit, or give --prices IN/OUT to `submit`",
                item.line,
            )


def _runs(file: BatchFile) -> Iterator[tuple[BatchItem, RunBody]]:
    for item in file.items:
        if isinstance(item.work, RunBody):
            yield item, item.work
