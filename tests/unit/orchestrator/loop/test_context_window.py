"""The context window: the parts that are shortened, their order, and the notices about it."""

from hypothesis import given
from hypothesis import strategies as st

from toolcrew.orchestrator.dialects.model import Message, TokenUsage
from toolcrew.orchestrator.loop.context_window import SHORTENED_CHARS, ContextWindow

LONG = "head " + "x" * 50_000 + " tail"


def messages(*contents: str) -> list[Message]:
    return [
        {"role": "tool", "tool_call_id": str(at), "name": "t", "content": content}
        for at, content in enumerate(contents)
    ]


def test_the_oldest_results_are_shortened_first_and_no_more_than_needed() -> None:
    originals = messages(LONG, LONG, LONG)
    fitted, shortened = ContextWindow(40_000).fit(originals, [0, 1], [2])
    assert (shortened, fitted[1:]) == (1, originals[1:])
    content = fitted[0]["content"]
    assert content.startswith("head xxx")
    assert content.endswith("xxx tail")
    assert (
        f"[... {len(LONG) - SHORTENED_CHARS} characters of this result are left out to fit the context window"
        in content
    )


def test_the_reported_token_usage_adjusts_the_estimate() -> None:
    window, originals = ContextWindow(40_000), messages(LONG, LONG)
    assert window.fit(originals, [0], [1])[1] == 0
    window.learn(originals, TokenUsage(prompt_tokens=100_000))
    assert window.fit(originals, [0], [1])[1] > 0


@given(
    contents=st.lists(st.text(max_size=3000), min_size=1, max_size=8),
    limit=st.integers(1, 4000),
    older=st.sets(st.integers(0, 7), max_size=8),
    newest=st.sets(st.integers(0, 7), max_size=8),
)
def test_only_the_selected_messages_are_shortened(
    contents: list[str], limit: int, older: set[int], newest: set[int]
) -> None:
    originals = messages(*contents)
    positions = {position for position in older | newest if position < len(contents)}
    fitted, shortened = ContextWindow(limit).fit(originals, positions - newest, positions & newest)
    changed = {position for position, (one, other) in enumerate(zip(originals, fitted, strict=True)) if one != other}
    assert changed <= positions
    assert shortened == len(changed)
    assert all(len(fitted[position]["content"]) < len(originals[position]["content"]) for position in changed)
