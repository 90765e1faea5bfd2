"""Shared code of the check.py scripts: read rows, compare answers, and print a table of verdicts."""

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

MAX_DETAIL_CHARS = 70
_ANSWER = re.compile(r"^[\s*_`#>-]*ANSWER[\s*_`]*:(?P<answer>.*)$", re.IGNORECASE)
_NUMBER = re.compile(r"[-+]?\d+(?:,\d{3})*(?:\.\d+)?")

Outcome = Literal["right", "wrong", "failed", "missing", "twice"]
Row = Mapping[str, Any]


class CannotCheck(Exception):
    """The check cannot run. The message says what to do."""


@dataclass(frozen=True)
class Verdict:
    """Verdict on one item. `detail`: the expected and the given answer, or why there is no answer."""

    item: str
    outcome: Outcome
    detail: str = ""


@dataclass(frozen=True)
class Output:
    """The rows of a batch by item, in the order of the file. `notes`: problems of the file."""

    rows: Mapping[str, Sequence[Row]]
    notes: Sequence[str] = ()


Judge = Callable[[Mapping[str, Any], Row], Verdict]
"""Function (line of expected.jsonl, the only row of the item, without an error) -> verdict."""


def read_jsonl(path: Path, advice: str) -> list[dict[str, Any]]:
    """Return the JSON objects of a file. Raises CannotCheck when the file cannot be read or has other content."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        return [dict(json.loads(line)) for line in lines if line.strip()]
    except (OSError, ValueError, TypeError) as error:
        raise CannotCheck(f"{path}: {error}: {advice}") from None


def read_output(path: Path) -> Output:
    """Read the output of a batch. Invalid lines become notes. Raises CannotCheck when the file cannot be read."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise CannotCheck(f"{path}: {error.strerror}: name the file that the batch wrote with --output") from None
    rows: dict[str, list[Row]] = {}
    notes: list[str] = []
    for number, line in enumerate(raw.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            rows.setdefault(row["custom_id"], []).append(row)
        except (ValueError, KeyError, TypeError, RecursionError):
            notes.append(
                f"{path.name}:{number}: not a row: if the batch still runs or was killed, resume it and check again"
            )
    return Output(rows, notes)


def judge_all(expected: Sequence[Mapping[str, Any]], output: Output, judge: Judge) -> list[Verdict]:
    """Return one verdict for each expected item, in the same order."""
    verdicts = []
    for line in expected:
        name, rows = str(line["id"]), output.rows.get(str(line["id"]), ())
        if not rows:
            verdicts.append(Verdict(name, "missing", "no row: resume the batch, or look into its errors file"))
        elif len(rows) > 1:
            verdicts.append(Verdict(name, "twice", f"{len(rows)} rows, one is allowed"))
        elif rows[0].get("error"):
            error = rows[0]["error"]
            detail = f"{error.get('code')}: {error.get('message')}" if isinstance(error, dict) else str(error)
            verdicts.append(Verdict(name, "failed", detail))
        else:
            verdicts.append(judge(line, rows[0]))
    return verdicts


def judge_answer(line: Mapping[str, Any], row: Row) -> Verdict:
    """Judge the last line of the reply that begins with ANSWER:."""
    name, expected = str(line["id"]), str(line["answer"])
    reply = find_reply(row)
    if reply is None:
        return Verdict(name, "wrong", "the row has no reply")
    answer = find_answer(reply)
    if answer is None:
        return Verdict(name, "wrong", f"no line begins with ANSWER: in {reply[-MAX_DETAIL_CHARS:]!r}")
    is_right = (
        is_number(answer, expected, float(line["tolerance"]))
        if line["kind"] == "number"
        else _plain(answer) == _plain(expected)
    )
    return Verdict(
        name, "right" if is_right else "wrong", expected if is_right else f"expected {expected!r}, came {answer!r}"
    )


def find_reply(row: Row) -> str | None:
    """Return the text of a row of an agent run or of a chat completion."""
    response = row.get("response")
    body = response.get("body") if isinstance(response, dict) else None
    if not isinstance(body, dict):
        return None
    if isinstance(body.get("answer"), str):
        return str(body["answer"])
    try:
        content = body["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError):
        return None
    return content if isinstance(content, str) else None


def find_answer(reply: str) -> str | None:
    """Return the text after the last ANSWER:, without the quotes and marks that models add."""
    answers = [match["answer"] for line in reply.splitlines() if (match := _ANSWER.match(line))]
    return answers[-1].strip().strip("*_`\"'<>").strip().removesuffix(".").strip("*_`\"'") if answers else None


def is_number(answer: str, expected: str, tolerance: float) -> bool:
    """Return whether `answer` has exactly one number, and its distance to `expected` is at most `tolerance`."""
    numbers = _NUMBER.findall(answer)
    # The small addition covers rounding errors of floats.
    return len(numbers) == 1 and abs(float(numbers[0].replace(",", "")) - float(expected)) <= tolerance + 1e-9


def _plain(text: str) -> str:
    return " ".join(text.split()).casefold().removeprefix("/workspace/").removeprefix("./")


def print_table(verdicts: Sequence[Verdict], output: Output) -> bool:
    """Print the verdicts, the unknown rows, and a summary. Return whether everything is right."""
    width = max((len(verdict.item) for verdict in verdicts), default=4)
    for verdict in verdicts:
        detail = _printable(verdict.detail)
        detail = detail if len(detail) <= 2 * MAX_DETAIL_CHARS else f"{detail[: 2 * MAX_DETAIL_CHARS]}..."
        sys.stdout.write(f"{verdict.item:<{width}}  {verdict.outcome:<7}  {detail}".rstrip() + "\n")
    unknown = sorted(output.rows.keys() - {verdict.item for verdict in verdicts})
    notes = [
        *output.notes,
        *(
            f"the row {name!r} belongs to no item of this batch: check the file that this batch wrote"
            for name in unknown
        ),
    ]
    for note in notes:
        sys.stdout.write(f"note: {_printable(note)}\n")
    counts = {
        outcome: sum(verdict.outcome == outcome for verdict in verdicts)
        for outcome in ("right", "wrong", "failed", "missing", "twice")
    }
    rest = ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count and outcome != "right")
    sys.stdout.write(f"{counts['right']} of {len(verdicts)} right{f'; {rest}' if rest else ''}\n")
    return counts["right"] == len(verdicts) and not notes


def _printable(text: str) -> str:
    """Replace control characters. Text of a model must not control the terminal."""
    return "".join(char if char.isprintable() else " " for char in text)


def run_check(
    folder: Path, description: str, build_judge: Callable[[argparse.Namespace], Judge], *, needs_artifacts: bool = False
) -> int:
    """Run a check. Return the exit code: 0 everything is right, 1 something is not right, 2 the check cannot run."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("output", type=Path, metavar="OUT.jsonl", help="output file of the batch (--output)")
    parser.add_argument(
        "--expected", type=Path, default=folder / "expected.jsonl", help="default: expected.jsonl next to this script"
    )
    parser.add_argument(
        "--artifacts", type=Path, metavar="DIR", required=needs_artifacts, help="folder with the files of the items"
    )
    arguments = parser.parse_args()
    try:
        expected = read_jsonl(arguments.expected, "create it as the README in its folder says")
        output = read_output(arguments.output)
        verdicts = judge_all(expected, output, build_judge(arguments))
    except CannotCheck as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0 if print_table(verdicts, output) else 1
