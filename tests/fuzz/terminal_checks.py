"""Random output of programs for the filter of the user's terminal."""

from itertools import pairwise
from random import Random

from tests.fuzz.terminal_model import ModelTerminal
from toolcrew.orchestrator.terminal.escape_filter import EscapeFilter

PIECES = (
    *"\x00\x05\x07\x08\t\n\r\x0e\x0f\x18\x1a\x1b\x7f",
    *"\x90\x9b\x9c\x9d\x9eé漢\U0001f600",
    *"[]PX^_kZc78=><?;:0123456789 !\"#$%&'()*+-./@ABHJKfhlmnpqrstuvwxyz{|}~",
    "\x1b[",
    "\x1b]",
    "\x1bP",
    "\x1b\\",
    "\x1b[?",
    "\x1b[>",
    "52;c;",
    "4;1;?",
    "10;?",
    "8;;https://a.example/",
    "8;;file:///etc/passwd",
    "1049h",
    "1049l",
    "2048h",
    "6n",
    "$q",
    "\x1b]8;;\x1b\\",
    "text",
)
BROKEN = (b"\x9b6n", b"\xc0\x9b", b"\xe0\x80\x9b", b"\xff", b"\xed\xa0\x80", b"\xc2", b"\xf0\x9f", b"\x85")


def build_output(random: Random) -> bytes:
    """Return random output: sequences, whole and cut, and bytes that are no UTF-8."""
    return b"".join(
        random.choice(BROKEN) if random.random() < 0.05 else random.choice(PIECES).encode()
        for _ in range(random.randrange(60))
    )


def check_terminal(random: Random) -> None:
    """Check that no terminal obeys what passes, that cuts change nothing, and that the reset undoes every mode."""
    output = build_output(random)
    whole, pieces = EscapeFilter(), EscapeFilter()
    passed = whole.feed(output)
    cuts = sorted(random.randrange(len(output) + 1) for _ in range(random.randrange(8)))
    borders = [0, *cuts, len(output)]
    cut = b"".join(pieces.feed(output[start:end]) for start, end in pairwise(borders))
    assert cut == passed, (output, borders)
    terminal = ModelTerminal()
    terminal.feed(passed.decode())
    assert not terminal.harms, (output, passed, terminal.harms)
    assert terminal.is_idle(), (output, passed)
    terminal.feed(whole.reset().decode())
    assert terminal.modes <= {"?7", "?25"}, (output, terminal.modes)
    assert not terminal.harms, output
    again = EscapeFilter()
    assert again.feed(passed) == passed, "a filtered text passes unchanged"
