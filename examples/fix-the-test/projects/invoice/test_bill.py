import unittest
from decimal import Decimal

from invoicing.bill import Line, total_cents
from invoicing.money import show, to_cents


class Money(unittest.TestCase):
    def test_amounts_are_shown_with_two_digits(self):
        self.assertEqual([show(cents) for cents in (0, 5, 1234, -5)], ["0.00", "0.05", "12.34", "-0.05"])

    def test_half_a_cent_is_rounded_away_from_zero(self):
        halves = [Decimal("0.005"), Decimal("0.015"), Decimal("0.025"), Decimal("-0.025")]
        self.assertEqual([to_cents(half) for half in halves], [1, 2, 3, -3])


class Totals(unittest.TestCase):
    def test_tax_is_added(self):
        self.assertEqual(total_cents([Line("tea", Decimal("10.00"))], Decimal(19)), 1190)

    def test_the_discount_comes_off_before_the_tax(self):
        lines = [Line("tea", Decimal("4.50"), 2), Line("cup", Decimal("11.00"))]
        self.assertEqual(total_cents(lines, Decimal(20), Decimal(10)), 2160)

    def test_an_invoice_without_lines_is_nothing(self):
        self.assertEqual(total_cents([], Decimal(19)), 0)


if __name__ == "__main__":
    unittest.main()
