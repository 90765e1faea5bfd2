import unittest
from datetime import datetime

from logreport.parsing import parse_line
from logreport.report import read_report

LOG = """\
2024-05-01T10:00:00 INFO web: started
2024-05-01T10:00:02 WARNING db: slow query: 1200 ms
2024-05-01T10:00:03 ERROR db: connection lost
2024-05-01T10:00:04 ERROR web: no answer

not a line of the log
2024-05-01T10:00:05 FATAL web: no such level
"""


class Parsing(unittest.TestCase):
    def test_a_line_has_four_parts(self):
        entry = parse_line("2024-05-01T10:00:00 INFO web: started\n")
        self.assertEqual((entry.at, entry.level), (datetime(2024, 5, 1, 10), "INFO"))
        self.assertEqual((entry.source, entry.message), ("web", "started"))

    def test_another_level_is_refused(self):
        with self.assertRaises(ValueError):
            parse_line("2024-05-01T10:00:05 FATAL web: no such level")


class Reports(unittest.TestCase):
    def test_messages_may_hold_colons(self):
        self.assertEqual(read_report(LOG.splitlines()).levels(), {"DEBUG": 0, "INFO": 1, "WARNING": 1, "ERROR": 2})

    def test_the_source_with_most_errors_is_the_first_by_name(self):
        self.assertEqual(read_report(LOG.splitlines()).worst_source(), "db")

    def test_an_empty_log_has_no_worst_source(self):
        self.assertIsNone(read_report([]).worst_source())


if __name__ == "__main__":
    unittest.main()
