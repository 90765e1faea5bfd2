"""The context window: the parts that are shortened, their order, and the notices about it."""

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.dialects.model import Message, TokenUsage
from orchestrator.loop.context_window import SHORTENED_CHARS, ContextWindow

LONG = "head " + "x" * 50_000 + " tail"


def messages(*contents: str) -> list[Message]:
    return [
        {"role": "tool", "tool_call_id": str(at), "name": "t", "content": content}
        for at, content in enumerate(contents)
    ]


def test_the_oldest_results_are_shortened_first_and_only_as_many_as_need_be() -> None:
    given_ones = messages(LONG, LONG, LONG)
    fitted, shortened = ContextWindow(40_000).fit(given_ones, [0, 1], [2])
    assert (shortened, fitted[1:]) == (1, given_ones[1:])
    content = fitted[0]["content"]
    assert content.startswith("head xxx")
    assert content.endswith("xxx tail")
    assert (
        f"[... {len(LONG) - SHORTENED_CHARS} characters of this result are left out to fit the context window"
        in content
    )


def test_what_a_request_really_took_sets_the_scale() -> None:
    window, given_ones = ContextWindow(40_000), messages(LONG, LONG)
    assert window.fit(given_ones, [0], [1])[1] == 0
    window.learn(given_ones, TokenUsage(prompt_tokens=100_000))
    assert window.fit(given_ones, [0], [1])[1] > 0


@given(
    contents=st.lists(st.text(max_size=3000), min_size=1, max_size=8),
    limit=st.integers(1, 4000),
    older=st.sets(st.integers(0, 7), max_size=8),
    newest=st.sets(st.integers(0, 7), max_size=8),
)
def test_shortening_touches_only_the_given(contents: list[str], limit: int, older: set[int], newest: set[int]) -> None:
    given_ones = messages(*contents)
    places = {place for place in older | newest if place < len(contents)}
    fitted, shortened = ContextWindow(limit).fit(given_ones, places - newest, places & newest)
    changed = {place for place, (one, other) in enumerate(zip(given_ones, fitted, strict=True)) if one != other}
    assert changed <= places
    assert shortened == len(changed)
    assert all(len(fitted[place]["content"]) < len(given_ones[place]["content"]) for place in changed)
