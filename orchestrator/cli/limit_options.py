"""Options of the commands that start runs: the limits of a run, made from the fields of RunLimits."""

from typing import Any

from pydantic import ValidationError

from toolcrew.contract.run_spec import CommonLimits, RunLimits
from toolcrew.orchestrator.cli.field_options import build_option, refuse, replace_parameter

_COMMON = [build_option(RunLimits, name) for name in CommonLimits.model_fields]


def _build_limits(fields: dict[str, Any]) -> RunLimits:
    try:
        return RunLimits(**fields)
    except ValidationError as error:
        raise refuse(error) from None


with_common_limits = replace_parameter("limits", _COMMON, _build_limits)
"""Replace the parameter `limits` of a command, a RunLimits, by one option for each common limit."""
with_limits = replace_parameter("limits", [*_COMMON, build_option(RunLimits, "max_cost")], _build_limits)
"""The same, with `--max-cost`, for a command that knows prices."""
