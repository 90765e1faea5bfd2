"""The report page: complete, small, usable offline, and safe against markup in foreign text."""

import re
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.runs.batch_events import (
    STARTED_AT,
    Attempt,
    build_batch_events,
    build_item_events,
    call_finished,
    ended,
    failed_attempt,
    step_finished,
)
from toolcrew.contract.calls import Clocks
from toolcrew.contract.run_events import BatchNotice, FailureKind, RunEvent
from toolcrew.orchestrator.batches.report import MAX_FAILED_ROWS, MAX_TOOLS, OTHER_TOOLS, build_report
from toolcrew.orchestrator.batches.report_plots import POINTS, add_up

HOSTILE = [
    "<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "]]><svg onload=alert(1)>",
    "</title></style></svg><iframe src=//x>", "\u202egnp.exe\u2066", "\x1b[31m\x00\x07\u2028", "'onmouseover='x",
    "&lt;b&gt;", "-->{{x}}${y}", "\ud800",
]  # fmt: skip
VOID = {"meta", "br"}


class Page(HTMLParser):
    """The page as a browser parses it. Fails if an element is not closed."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"a comment came from somewhere: {data}")

    def values(self, name: str) -> list[str]:
        return [value for _, attribute, value in self.attributes if attribute == name]

    def text(self) -> str:
        return "\n".join(self.texts)


SAMPLE_PAGE = Page(
    build_report(
        build_batch_events(
            (Attempt(),), (failed_attempt(),), (Attempt(is_retried=True), Attempt()), (Attempt(is_unfinished=True),)
        ),
        title="t",
    )
)


def hostile_batch(text: str) -> Iterator[RunEvent]:
    yield BatchNotice(at=STARTED_AT, message=text, total=4)
    yield from build_item_events(text, Attempt(tool=text))
    yield from build_item_events(f"{text}2", failed_attempt(code=text, message=text))
    yield from build_item_events(f"{text}3", Attempt(is_unfinished=True, tool=text))
    yield ended(at=STARTED_AT, item="x", run=text, failure=FailureKind.MODEL, code=text, message=text)


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_event_texts_add_no_tags_or_attributes(text: str) -> None:
    page = Page(build_report(hostile_batch(text), title=text, batch=text))
    harmless = Page(build_report(hostile_batch("harmless"), title="harmless", batch="harmless"))
    assert page.tags == harmless.tags
    assert Counter((tag, name) for tag, name, _ in page.attributes) == Counter(
        (tag, name) for tag, name, _ in harmless.attributes
    )
    assert not re.search(
        "[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\u2028\u2029\ud800-\udfff]",
        "".join(page.texts + page.values("aria-label")),
    )


@settings(max_examples=40, deadline=None)
@given(text=st.text(st.characters(exclude_categories=()), min_size=1, max_size=40))
def test_any_event_text_adds_no_tags_or_attributes(text: str) -> None:
    page = Page(build_report(hostile_batch(text), title=text))
    assert page.tags.keys() <= SAMPLE_PAGE.tags.keys()
    assert {(tag, name) for tag, name, _ in page.attributes} <= {(tag, name) for tag, name, _ in SAMPLE_PAGE.attributes}


def test_the_page_loads_no_external_resources_and_runs_no_script() -> None:
    page = SAMPLE_PAGE
    policy = next(value for value in page.values("content") if "default-src" in value)
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'")
    assert not {"script", "link", "img", "iframe", "object", "embed", "form", "base"} & page.tags.keys()
    assert not {"src", "srcset", "action", "style", "xlink:href"} & {name for _, name, _ in page.attributes}
    assert not any(name.startswith("on") for _, name, _ in page.attributes)
    assert all(value.startswith("#") for value in page.values("href"))
    assert "url(" not in page.text()
    assert "@import" not in page.text()


def test_the_page_is_accessible_to_screen_readers() -> None:
    page = SAMPLE_PAGE
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    assert {name[1:] for name in page.values("href")} <= set(ids)
    assert page.tags["table"] == page.tags["caption"]
    assert page.tags["svg"] == page.values("role").count("img") == page.tags["desc"]
    assert {name for value in page.values("aria-labelledby") for name in value.split()} <= set(ids)
    assert (page.tags["h1"], page.tags["main"], page.tags["nav"]) == (1, 1, 1)
    assert all(value == "en" for value in page.values("lang"))
    assert "prefers-color-scheme: dark" in page.text()
    assert "width=device-width" in "".join(page.values("content"))


def test_failures_above_the_row_limit_are_counted() -> None:
    events = [
        batch_event
        for n in range(MAX_FAILED_ROWS + 20)
        for batch_event in build_item_events(f"i{n}", failed_attempt(steps=0), at=STARTED_AT + n)
    ]
    page = Page(build_report(events, title="t"))
    assert "20 more failed items are not listed here; the error file has all of them." in page.texts
    assert (f"i{MAX_FAILED_ROWS - 1}" in page.texts, f"i{MAX_FAILED_ROWS}" in page.texts) == (True, False)


def test_long_hostile_failures_keep_the_page_below_two_megabytes() -> None:
    messages = [
        ended(
            at=STARTED_AT + n,
            item=f"{n}{'&' * 250}",
            failure=FailureKind.MODEL,
            code=f"{n}{chr(34) * 300}",
            message="\u202e'\"&<" * 5000,
            seconds=1,
        )
        for n in range(2000)
    ]
    calls = [
        call_finished(at=STARTED_AT, item="a", call=str(n), tool=f"{n}" + "'" * 500, seconds=0.0001 * 1.1 ** (n % 180))
        for n in range(20_000)
    ]
    assert len(build_report([*messages, *calls], title="&" * 500).encode()) < 2_000_000


@pytest.mark.parametrize("at", [0.0, -1e9, 1e308, 1.7e308, -1.7e308])
def test_invalid_timestamps_give_a_valid_page(at: float) -> None:
    events = [
        *build_batch_events((Attempt(),)),
        *build_item_events("x", failed_attempt(), at=at),
        step_finished(at=at, item="y", step=1, tokens=(5, 0)),
    ]
    page = Page(build_report(events, title="t"))
    assert not re.search(r"\b(nan|inf)\b", " ".join(page.values("x") + page.values("points") + page.values("width")))


moments = st.floats(-1e15, 1e15) | st.floats(-1e3, 1e3)


@given(times=st.lists(moments, min_size=1), shuffle=st.randoms(use_true_random=False))
def test_cumulative_sums_are_exact_and_bounded_in_any_order(times: list[float], shuffle: object) -> None:
    sums = []
    for _ in range(2):
        sums.append(add_up([(time, 1) for time in times], min(times), max(times)))
        shuffle.shuffle(times)  # type: ignore[attr-defined]
    assert sums[0] == sums[1]
    assert len(sums[0]) == POINTS + 1
    assert sums[0][-1][1] == len(times)
    assert all(value == sum(time <= moment for time in times) for moment, value in sums[0][:-1])


@given(runs=st.lists(st.tuples(st.floats(0, 1000), st.floats(0, 1000)), min_size=1))
def test_the_number_of_running_items_is_exact_at_every_point(runs: list[tuple[float, float]]) -> None:
    spans = [(started, started + length) for started, length in runs]
    amounts = [(started, 1) for started, _ in spans] + [(ended, -1) for _, ended in spans]
    points = add_up(amounts, min(started for started, _ in spans), max(ended for _, ended in spans))
    assert points[-1][1] == 0
    for moment, value in points[:-1]:
        assert value == sum(started <= moment < ended for started, ended in spans)


def test_an_item_cancelled_in_the_queue_is_not_counted_as_running() -> None:
    messages = [ended(at=STARTED_AT + 5, item=str(n), failure=FailureKind.CANCELLED) for n in range(9)]
    page = Page(build_report([*messages, *build_item_events("a", Attempt(steps=9))], title="t"))
    assert "running: 1 at most" in page.text()


def test_tool_names_above_the_limit_share_one_row() -> None:
    calls: list[RunEvent] = [
        call_finished(at=STARTED_AT, item="a", call=str(n), tool=f"t{n}" * 99, seconds=0.1) for n in range(1000)
    ]
    texts = Page(build_report(calls, title="t")).texts
    assert texts[texts.index(OTHER_TOOLS) + 1] == str(1000 - MAX_TOOLS)


def test_an_item_that_succeeded_after_a_retry_is_not_listed_as_failed() -> None:
    page = Page(build_report(build_batch_events((failed_attempt(message="it was away"), Attempt())), title="t"))
    assert "No item has failed." in page.texts
    assert "it was away" not in page.text()


def test_the_tool_table_lists_percentiles_errors_and_queue_time() -> None:
    seconds = [0.1 * number for number in range(1, 101)]
    calls = [
        call_finished(
            at=STARTED_AT,
            item="a",
            call=str(number),
            tool="bash_tool",
            seconds=value,
            error_code="TIMEOUT" if number % 10 == 0 else None,
            clocks=Clocks(queued_s=value / 10),
        )
        for number, value in enumerate(seconds)
    ]
    texts = Page(build_report([*calls, *calls], title="t")).texts
    first = texts.index("bash_tool")
    assert texts[first + 1 : first + 8] == ["100", "5.0 s", "5.0 s", "9.5 s", "10.0 s", "10", "950 ms"]
