"""The one rule for nouns behind numbers in texts for people and models."""


def plural(number: int | float, one: str, many: str = "") -> str:
    """Return `one` if the number is 1, otherwise `many`. Default of `many`: `one` with the usual ending."""
    if number == 1:
        return one
    return many or f"{one}{'es' if one.endswith('ch') else 's'}"


def count(number: int, one: str, many: str = "") -> str:
    """Return the number with its noun, such as `1 file`, `2 files`, `3 matches`. The noun may include a verb."""
    return f"{number} {plural(number, one, many)}"
