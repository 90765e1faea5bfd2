"""Parses the reward that a grader wrote."""

import math
import re

from contract.strict_json import InvalidJson, parse_object

MAX_REWARD_BYTES = 64 * 1024
MAX_SCORES = 100
MAX_SCORE_NAME = 100
_NUMBER = re.compile(r"[0-9]{1,30}(\.[0-9]{1,30})?([eE][+-]?[0-9]{1,3})?", re.ASCII)


class InvalidReward(Exception):
    """The file has no valid reward. The message is a sentence."""


def parse_reward(content: bytes) -> dict[str, float]:
    """Return the scores of a reward file: a number, or an object of finite numbers with one named `reward`. The reward
    is at least 0 and at most 1.

    Raises InvalidReward.
    """
    if len(content) > MAX_REWARD_BYTES:
        raise InvalidReward(f"the reward file has {len(content)} bytes, and the limit is {MAX_REWARD_BYTES}")
    try:
        text = content.decode().strip()
        scores = parse_object(text, MAX_SCORES) if text.startswith("{") else {"reward": _parse_number(text)}
    except (UnicodeDecodeError, InvalidJson) as error:
        raise InvalidReward(f"the reward file is neither a number nor an object in JSON: {str(error)[:200]}") from error
    if len(scores) > MAX_SCORES or any(len(name) > MAX_SCORE_NAME for name in scores):
        raise InvalidReward(f"the reward file has more than {MAX_SCORES} numbers, or a name that is too long")
    for name, score in scores.items():
        if type(score) not in (int, float) or not math.isfinite(score) or abs(score) > 1e300:
            raise InvalidReward(f"`{name}` in the reward file is not a finite number")
    if "reward" not in scores:
        raise InvalidReward("the object in the reward file has no `reward`")
    if not 0 <= scores["reward"] <= 1:
        raise InvalidReward(f"the reward is {scores['reward']:g} and not between 0 and 1")
    return {name: float(score) for name, score in scores.items()}


def _parse_number(text: str) -> float:
    """Return the number. Raises InvalidReward."""
    if not _NUMBER.fullmatch(text):
        raise InvalidReward(f"the reward file has no number of at least 0: {text[:40]!a}")
    return float(text)
