import unittest

from recent import Recent


class Keeping(unittest.TestCase):
    def test_it_never_holds_more_than_its_size(self):
        recent = Recent(2)
        for number in range(5):
            recent.put(number, str(number))
        self.assertEqual(len(recent), 2)
        self.assertIn(4, recent)
        self.assertNotIn(2, recent)

    def test_writing_again_is_a_use(self):
        recent = Recent(2)
        recent.put("a", 1)
        recent.put("b", 2)
        recent.put("a", 3)
        recent.put("c", 4)
        self.assertEqual((recent.get("a"), recent.get("b")), (3, None))

    def test_reading_is_a_use(self):
        recent = Recent(2)
        recent.put("a", 1)
        recent.put("b", 2)
        recent.get("a")
        recent.put("c", 3)
        self.assertIn("a", recent)
        self.assertNotIn("b", recent)

    def test_looking_whether_it_is_there_is_none(self):
        recent = Recent(2)
        recent.put("a", 1)
        recent.put("b", 2)
        self.assertIn("a", recent)
        recent.put("c", 3)
        self.assertNotIn("a", recent)

    def test_hits_and_misses_are_counted(self):
        recent = Recent(1)
        recent.put("a", None)
        recent.get("a")
        recent.get("b", 7)
        self.assertEqual((recent.hits, recent.misses), (1, 1))


if __name__ == "__main__":
    unittest.main()
