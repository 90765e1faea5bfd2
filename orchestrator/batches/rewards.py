"""Parses the reward that a grader wrote."""

import math
import re
from typing import Any

from toolcrew.contract.strict_json import InvalidJson, parse_object

MAX_REWARD_BYTES = 64 * 1024
MAX_SCORES = 100
MAX_SCORE_NAME = 100
MAX_NUMBER_CHARS = 4000
TOLERANCE = 1e-9
"""Distance from 0 or 1 up to which a reward is 0 or 1. Sums of decimal fractions miss them by about 1e-16."""
_NUMBER = re.compile(r"[+-]?([0-9]++\.?[0-9]*+|\.[0-9]++)([eE][+-]?[0-9]{1,9})?", re.ASCII)


class InvalidReward(Exception):
    """The file has no valid reward. The message is a sentence."""


def parse_reward(content: bytes) -> dict[str, float]:
    """Return the scores of a reward file: a number, or an object of finite numbers with one named `reward`. A number
    may be a text, such as `+1`, `.5` or `"1e0"`. The reward is at least 0 and at most 1, with TOLERANCE.

    Raises InvalidReward.
    """
    if len(content) > MAX_REWARD_BYTES:
        raise InvalidReward(f"the reward file has {len(content)} bytes, and the limit is {MAX_REWARD_BYTES}")
    try:
        text = content.decode("utf-8-sig").strip()
        values = parse_object(text, MAX_SCORES) if text.startswith("{") else {"reward": _unquote(text)}
    except (UnicodeDecodeError, InvalidJson) as error:
        raise InvalidReward(f"the reward file is neither a number nor an object in JSON: {str(error)[:200]}") from error
    if len(values) > MAX_SCORES or any(len(name) > MAX_SCORE_NAME for name in values):
        raise InvalidReward(f"the reward file has more than {MAX_SCORES} numbers, or a name that is too long")
    scores = {name: _read_number(name, value) for name, value in values.items()}
    if "reward" not in scores:
        raise InvalidReward("the object in the reward file has no `reward`")
    scores["reward"] = _snap(scores["reward"])
    if not 0 <= scores["reward"] <= 1:
        raise InvalidReward(f"the reward is {scores['reward']:g} and not between 0 and 1: let the grader scale it")
    return scores


def _unquote(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] == '"' else text


def _read_number(name: str, value: Any) -> float:
    """Return the number. Raises InvalidReward."""
    if isinstance(value, str):
        text = value.strip()
        number = float(text) if len(text) <= MAX_NUMBER_CHARS and _NUMBER.fullmatch(text) else math.nan
    else:
        number = float(value) if type(value) in (int, float) and abs(value) < 1e300 else math.nan
    if not math.isfinite(number) or abs(number) > 1e300:
        shown = f"{value[:40]!a}" if isinstance(value, str) else type(value).__name__
        raise InvalidReward(f"`{name}` in the reward file is {shown} and not a finite number, such as 0.5")
    return number


def _snap(reward: float) -> float:
    return next((float(end) for end in (0, 1) if abs(reward - end) <= TOLERANCE), reward)
