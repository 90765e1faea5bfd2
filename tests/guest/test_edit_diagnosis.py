"""Diagnosis of an old_string that was not found: each common mistake is named, with the line of the text."""

import time

import pytest

from tests.support.guest.guest_harness import GUEST_PARENT

assert GUEST_PARENT

from guest.files.closest_block import find_closest  # noqa: E402
from guest.files.edit import Edit  # noqa: E402
from guest.files.edit_diagnosis import explain_miss  # noqa: E402
from guest.files.file_texts import FileText  # noqa: E402

FILE = """import os

def first(value):
    if value == "one":
        return os.path.join("a", "b")
    return None

def second(value):
\treturn print('Hello\\n')
"""


def explain(
    old: str,
    new: str = "entirely new",
    data: bytes = FILE.encode(),
    change: tuple[bytes, str] | None = None,
    s: float = 5,
) -> str:
    text = FileText(data, "f")
    edit = Edit({"old_string": old, "new_string": new}, 1, 1)
    return explain_miss(edit, text, text.body, change, time.monotonic() + s)


@pytest.mark.parametrize(
    ("old", "message"),
    [
        (
            '4\t    if value == "one":\n5\t        return os',
            (
                "line numbers, as read_tool shows them, which are not in the file: leave them out. Without them it "
                "stands at line 4"
            ),
        ),
        ("  8→def second(value):", "Without them it stands at line 8"),
        ('if value == \\"one\\":', "escaped characters"),
        ("import os\\n\\ndef first", "escaped characters"),
        ("print('Hello\n')", "with a backslash before characters"),
        ("if value == &quot;one&quot;:", "&lt;, &amp; or the like"),
        ("def first(value):\n  if value", "line 4 of the file begins with 4 spaces, old_string has 2 spaces there"),
        ("    return print('Hello\\n')", "line 9 of the file begins with 1 tab, old_string has 4 spaces there"),
        ("import os\n\n\n\n", "Without the blanks and line ends at its own beginning and end it stands at line 1"),
        ("import os  \n\ndef first(value):   \n", "blanks at the ends of lines, in the text from line 1"),
        ("def  first( value):".replace("( ", "("), "blanks within or around its lines, in the text from line 3"),
        ("Import OS", "upper and lower case, at line 1"),
        (
            "if value == \u201cone\u201d:",
            'look alike, at line 4: old_string has \u201c (U+201C), \u201d (U+201D), the file has " (U+0022)',
        ),
        ("import\u00a0os", "look alike, at line 1"),
        ("if\uff08value\uff09", "Read the file again"),
        ("  first(value):\n    if value", "see the lines with read_tool"),
        ("import os\r\n\r\ndef first", "only in its line ends"),
        ('retrun os.path.joni("a", "b")', "Closest: line 5, "),
        ("completely unrelated words 12345", "Read the file again with read_tool and copy the text as it is."),
    ],
)
def test_each_common_mistake_is_named(old: str, message: str) -> None:
    assert message in explain(old)
    assert "blanks at the ends of lines, in the text from line 1" in explain("a\nb\n", data=b"a  \nb\t\n")


def test_an_already_applied_replacement_is_named() -> None:
    assert "new_string is in the file already, at line 3" in explain("def zeroth(arg):", "def first(value):")
    assert "already" not in explain("def zeroth(arg):", "def")


def test_a_change_by_another_process_is_reported_with_its_diff() -> None:
    assert explain("was here", change=(b"was here\n", "@@ diff @@")) == (
        "It was there when this session last read the file, which has been changed by something else since:\n@@ diff @@"
    )
    assert explain("never here", change=(b"", "@@ diff @@")).startswith("The file has been changed")


def test_the_closest_block_is_shown_with_its_lines_and_a_diff() -> None:
    message = explain('    if value == "two":\n        return os.path.join("a", "b")\n    return 0')
    assert "Closest: lines 4-6, " in message
    assert '-    if value == "two":\n+    if value == "one":' in message
    assert "-    return 0\n+    return None" in message


def test_the_explanation_is_bounded_in_size() -> None:
    data = "".join(f"{'word ' * 100}{number}\n" for number in range(300)).encode()
    old = "".join(f"{'word ' * 100}{number}!\n" for number in range(290))
    assert 100 < len(explain(old, data=data)) < 3500


@pytest.mark.parametrize(
    "line",
    [
        "x = call(a, b)\n",
        "\n",
        "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\n",
        "日本語のテキスト\n",
        "}\n",
    ],
)
def test_a_file_of_10_mb_is_explained_in_bounded_time(line: str) -> None:
    data = line.encode() * (10_000_000 // len(line.encode()))
    started = time.process_time()
    explain("x = cal1(a, b)\n}\nlast = 1", data=data, s=0.5)
    assert time.process_time() - started < 3


def test_the_most_similar_block_is_selected() -> None:
    lines = [f"def function_{number}(value):" if number % 2 else "    return value" for number in range(400)]
    lines[201] = "def wanted_function(value, other):"
    match = find_closest(lines, ["def wanted_function(value, another):", "    return value"], time.monotonic() + 5)
    assert match is not None
    assert match[:2] == (201, 203)
