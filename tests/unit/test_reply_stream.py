"""Text of a reply that broke off and came again: nothing is shown twice, and what does not hold is withdrawn."""

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.reply_stream import ShownText


class Display:
    """What a user sees who follows the events."""

    def __init__(self) -> None:
        self.text = ""
        self.told: list[str] = []

    def take(self, void: int, text: str) -> None:
        self.text = self.text[: len(self.text) - void] + text
        self.told += [text] if text else []


def show(replies: list[list[str]]) -> Display:
    shown, display = ShownText(), Display()
    for at, pieces in enumerate(replies):
        if at:
            shown.begin_again()
        for piece in pieces:
            display.take(*shown.show(piece))
    display.take(shown.end(), "")
    return display


def test_text_of_a_whole_reply_is_shown_as_it_comes() -> None:
    assert show([["a", "b"]]).told == ["a", "b"]


def test_the_same_text_is_not_shown_again() -> None:
    assert show([["The ans"], ["The", " answer", " is 4"]]).told == ["The ans", "wer", " is 4"]


def test_other_words_take_the_place_of_what_was_shown() -> None:
    display = show([["It is five"], ["It is", " four."]])
    assert (display.text, display.told) == ("It is four.", ["It is five", "our."])


def test_a_shorter_reply_takes_back_the_rest() -> None:
    assert show([["a long reply"], ["a long"]]).text == "a long"


def test_a_reply_may_break_off_again_and_again() -> None:
    assert show([["abc"], ["ab"], ["abcd"], ["abcd", "e"]]).told == ["abc", "d", "e"]


@given(st.lists(st.lists(st.text("ab", max_size=4), max_size=4), min_size=1, max_size=4))
def test_in_the_end_the_last_reply_stands(replies: list[list[str]]) -> None:
    assert show(replies).text == "".join(replies[-1])
