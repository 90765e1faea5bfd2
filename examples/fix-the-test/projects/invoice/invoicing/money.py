"""Amounts of money in cents."""

from decimal import Decimal


def to_cents(amount: Decimal) -> int:
    """Half a cent is rounded away from zero, as invoices are."""
    return int((amount * 100).quantize(Decimal(1)))


def show(cents: int) -> str:
    sign = "-" if cents < 0 else ""
    return f"{sign}{abs(cents) // 100}.{abs(cents) % 100:02d}"
