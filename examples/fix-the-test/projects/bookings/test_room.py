import unittest

from bookings.room import find_free, merge
from bookings.slots import Slot

DAY = Slot(8 * 60, 18 * 60)


class Merging(unittest.TestCase):
    def test_slots_that_touch_become_one(self):
        self.assertEqual(merge([Slot(600, 660), Slot(540, 600)]), [Slot(540, 660)])

    def test_slots_apart_stay_apart(self):
        self.assertEqual(merge([Slot(700, 710), Slot(600, 660)]), [Slot(600, 660), Slot(700, 710)])

    def test_nothing_is_merged_to_nothing(self):
        self.assertEqual(merge([]), [])


class Free(unittest.TestCase):
    def test_an_empty_day_is_free(self):
        self.assertEqual(find_free([], DAY), [DAY])

    def test_a_short_booking_within_a_long_one_frees_nothing(self):
        booked = [Slot(9 * 60, 12 * 60), Slot(10 * 60, 10 * 60 + 15)]
        self.assertEqual(find_free(booked, DAY), [Slot(8 * 60, 9 * 60), Slot(12 * 60, 18 * 60)])

    def test_gaps_that_are_too_short_are_left_out(self):
        booked = [Slot(8 * 60 + 10, 17 * 60)]
        self.assertEqual(find_free(booked, DAY, minutes=30), [Slot(17 * 60, 18 * 60)])


if __name__ == "__main__":
    unittest.main()
