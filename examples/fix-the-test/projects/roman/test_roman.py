import unittest

from roman import from_roman, to_roman


class ToRoman(unittest.TestCase):
    def test_small_numbers(self):
        self.assertEqual([to_roman(number) for number in (1, 2, 3, 4, 5, 9)], ["I", "II", "III", "IV", "V", "IX"])

    def test_years(self):
        self.assertEqual(to_roman(1815), "MDCCCXV")
        self.assertEqual(to_roman(2024), "MMXXIV")

    def test_numbers_out_of_range(self):
        for number in (0, -1, 4000):
            with self.assertRaises(ValueError):
                to_roman(number)


class FromRoman(unittest.TestCase):
    def test_every_number_comes_back(self):
        for number in range(1, 4000):
            numeral = to_roman(number)
            self.assertNotRegex(numeral, r"(.)\1{3}", f"{number} has a digit four times")
            self.assertEqual(from_roman(numeral), number)

    def test_texts_that_are_no_numerals(self):
        for text in ("", "IIII", "VX", "IC", "MMXXIIV", "abc"):
            with self.assertRaises(ValueError):
                from_roman(text)


if __name__ == "__main__":
    unittest.main()
