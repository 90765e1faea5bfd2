"""Scripts of the model server are validated as a whole: every wrong line is reported, with its fix."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.model_server.script import BadScript, parse_script
from tests.model_server.templates import fill

RULE = '{"kind": "rule", "reply": {"text": "ok"}}'


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("{", "s:2: column 2: not JSON"),
        ("[]", "s:2: "),
        ('{"reply": {}}', 's:2: the field "kind" is missing: add server, rule or fault'),
        ('{"kind": "rule"}', "s:2: reply: is missing: add it"),
        ('{"kind": "rule", "replay": {}, "reply": {}}', "s:2: replay: there is no such field"),
        ('{"kind": "rule", "kind": "rule", "reply": {}}', "s:2: the key 'kind' comes twice"),
        ('{"kind": "rule", "reply": {"first_byte_s": NaN}}', "s:2: NaN is not JSON"),
        (
            '{"kind": "rule", "when": {"observation": "("}, "reply": {}}',
            "s:2: when.observation: not a regular expression",
        ),
        ('{"kind": "rule", "reply": {"text": "{{itm}}"}}', "s:2: {{itm}}: there is no 'itm', take one of item, "),
        ('{"kind": "rule", "reply": {"text": "{{item|upper}}"}}', "there is no filter 'upper', take one of strip, "),
        (
            '{"kind": "rule", "reply": {"calls": [{"name": "x", "arguments": {"a": ["{{match.n}}"]}}]}}',
            "name the group in when.observation",
        ),
        ('{"kind": "rule", "reply": {"text": "x", "chunks": []}}', "s:2: reply: chunks stand alone"),
        ('{"kind": "rule", "reply": {"whole": "x"}}', "s:2: reply: whole goes with chunks"),
        (
            '{"kind": "rule", "reply": {"spelling": "json", "calls": [{"name": "a"}, {"name": "b"}]}}',
            "room for one call",
        ),
        ('{"kind": "fault", "fault": {"kind": "explode"}}', "s:2: fault"),
        ('{"kind": "fault", "fault": {"kind": "status", "status": 200}}', "s:2: fault.fault.status.status"),
        ('{"kind": "fault", "fault": {"kind": "cut"}, "first": 1, "probability": 0.5}', "exclude each other"),
        ('{"kind": "fault", "fault": {"kind": "cut"}, "per": "step"}', "per goes with first"),
        ('{"kind": "server", "key": "item"}', "s:2: key: write exactly one group"),
        ('{"kind": "server"}\n{"kind": "server"}', "s: 2 lines of kind server: make one of them"),
        ("[" * 100_000, "s:2: nested too deep"),
    ],
)
def test_a_wrong_line_is_named_with_what_to_do(line: str, expected: str) -> None:
    with pytest.raises(BadScript) as caught:
        parse_script(f"{RULE}\n{line}\n", "s")
    assert expected in str(caught.value)


def test_blank_lines_and_remarks_are_passed_over_and_a_line_separator_in_a_text_is_none() -> None:
    script = parse_script(
        f"# first\n\n{RULE}\r\n" + json.dumps({"kind": "rule", "reply": {"text": "a\u2028b"}}, ensure_ascii=False)
    )
    assert [rule.reply.text for rule in script.rules] == ["ok", "a\u2028b"]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{item}}-{{ item }}", "7-7"),
        ("{{observation|first_line}}|{{observation|last_line}}", "one|3 three"),
        ("{{observation|number}}", "3"),
        ("{{item|int}}", 7),
        ({"n": ["{{item|int}}", "x{{item|int}}"]}, {"n": [7, "x7"]}),
        ("awk '{print $1}' <<E {{1}} {{ {{", "awk '{print $1}' <<E {{1}} {{ {{"),
        (None, None),
    ],
)
def test_places_are_filled_and_other_braces_stay(template: Any, expected: Any) -> None:
    assert fill(template, {"item": "7", "observation": "\none\n3 three\n\n"}) == expected


@given(st.text())
def test_filled_values_are_not_expanded_again(text: str) -> None:
    assert fill("<{{observation}}>", {"observation": text}) == f"<{text}>"
