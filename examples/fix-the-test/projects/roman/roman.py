"""Roman numerals from 1 to 3999."""

VALUES = (
    (1000, "M"),
    (900, "CM"),
    (500, "D"),
    (400, "CD"),
    (100, "C"),
    (90, "XC"),
    (50, "L"),
    (10, "X"),
    (9, "IX"),
    (5, "V"),
    (4, "IV"),
    (1, "I"),
)
DIGITS = {"I": 1, "V": 5, "X": 10, "L": 50, "C": 100, "D": 500, "M": 1000}


def to_roman(number: int) -> str:
    if not 1 <= number <= 3999:
        raise ValueError(f"no Roman numeral for {number}")
    parts = []
    for value, numeral in VALUES:
        count, number = divmod(number, value)
        parts.append(numeral * count)
    return "".join(parts)


def from_roman(text: str) -> int:
    """Raises ValueError for what to_roman would not write."""
    try:
        digits = [DIGITS[char] for char in text]
    except KeyError as error:
        raise ValueError(f"{error.args[0]!r} is no Roman digit") from None
    total = 0
    for digit, following in zip(digits, [*digits[1:], 0], strict=True):
        total += -digit if digit < following else digit
    if not text or to_roman(total) != text:
        raise ValueError(f"{text!r} is no Roman numeral")
    return total
