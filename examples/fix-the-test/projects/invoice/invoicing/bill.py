"""The sum of an invoice."""

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

from invoicing.money import to_cents


@dataclass(frozen=True)
class Line:
    text: str
    price: Decimal
    quantity: int = 1

    @property
    def amount(self) -> Decimal:
        return self.price * self.quantity


def total_cents(lines: Sequence[Line], tax_percent: Decimal, discount_percent: Decimal = Decimal(0)) -> int:
    """Return the total: subtract the discount, add the tax, and round once at the end."""
    net = sum((line.amount for line in lines), Decimal(0)) * (100 - discount_percent) / 100
    return to_cents(net * (100 + tax_percent) / 100)
