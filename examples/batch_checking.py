"""What the check.py of every example batch shares: rows read, answers compared, a table of verdicts printed."""

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

MAX_TOLD_CHARS = 70
_ANSWER = re.compile(r"^[\s*_`#>-]*ANSWER[\s*_`]*:(?P<answer>.*)$", re.IGNORECASE)
_NUMBER = re.compile(r"[-+]?\d+(?:,\d{3})*(?:\.\d+)?")

Word = Literal["right", "wrong", "failed", "missing", "twice"]
Row = Mapping[str, Any]


class CannotCheck(Exception):
    """There is nothing to judge by; the sentence says what to do."""


@dataclass(frozen=True)
class Verdict:
    """Of one item. `told`: what was expected and what came, or why there is no answer."""

    item: str
    word: Word
    told: str = ""


@dataclass(frozen=True)
class Output:
    """A batch's rows by item, each in the order of the file. `notes`: what is wrong with the file itself."""

    rows: Mapping[str, Sequence[Row]]
    notes: Sequence[str] = ()


Judge = Callable[[Mapping[str, Any], Row], Verdict]
"""(line of expected.jsonl, the item's only row without an error) -> verdict."""


def read_jsonl(path: Path, advice: str) -> list[dict[str, Any]]:
    """Raises CannotCheck for a file that cannot be read or holds something else."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        return [dict(json.loads(line)) for line in lines if line.strip()]
    except (OSError, ValueError, TypeError) as error:
        raise CannotCheck(f"{path}: {error}: {advice}") from None


def read_output(path: Path) -> Output:
    """Raises CannotCheck for a file that cannot be read; lines that are no rows become notes."""
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
    """A verdict for each expected item, in their order."""
    verdicts = []
    for line in expected:
        name, rows = str(line["id"]), output.rows.get(str(line["id"]), ())
        if not rows:
            verdicts.append(Verdict(name, "missing", "no row: resume the batch, or look into its errors file"))
        elif len(rows) > 1:
            verdicts.append(Verdict(name, "twice", f"{len(rows)} rows, one is allowed"))
        elif rows[0].get("error"):
            error = rows[0]["error"]
            told = f"{error.get('code')}: {error.get('message')}" if isinstance(error, dict) else str(error)
            verdicts.append(Verdict(name, "failed", told))
        else:
            verdicts.append(judge(line, rows[0]))
    return verdicts


def judge_answer(line: Mapping[str, Any], row: Row) -> Verdict:
    """By the last line of the reply that begins with ANSWER:."""
    name, expected = str(line["id"]), str(line["answer"])
    reply = find_reply(row)
    if reply is None:
        return Verdict(name, "wrong", "the row holds no reply")
    answer = find_answer(reply)
    if answer is None:
        return Verdict(name, "wrong", f"no line begins with ANSWER: in {reply[-MAX_TOLD_CHARS:]!r}")
    is_right = (
        is_number(answer, expected, float(line["tolerance"]))
        if line["kind"] == "number"
        else _plain(answer) == _plain(expected)
    )
    return Verdict(
        name, "right" if is_right else "wrong", expected if is_right else f"expected {expected!r}, came {answer!r}"
    )


def find_reply(row: Row) -> str | None:
    """The text of an agent run's row, or of a chat completion's."""
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
    """What follows the last ANSWER:, without the marks that models put around it."""
    found = [match["answer"] for line in reply.splitlines() if (match := _ANSWER.match(line))]
    return found[-1].strip().strip("*_`\"'<>").strip().removesuffix(".").strip("*_`\"'") if found else None


def is_number(answer: str, expected: str, tolerance: float) -> bool:
    """Whether the only number in `answer` is as near to `expected` as allowed."""
    numbers = _NUMBER.findall(answer)
    # The last bit is for what binary fractions cannot say.
    return len(numbers) == 1 and abs(float(numbers[0].replace(",", "")) - float(expected)) <= tolerance + 1e-9


def _plain(text: str) -> str:
    return " ".join(text.split()).casefold().removeprefix("/workspace/").removeprefix("./")


def print_table(verdicts: Sequence[Verdict], output: Output) -> bool:
    """The verdicts, rows that nobody expects, and the sum. True when all is right."""
    width = max((len(verdict.item) for verdict in verdicts), default=4)
    for verdict in verdicts:
        told = _printable(verdict.told)
        told = told if len(told) <= 2 * MAX_TOLD_CHARS else f"{told[: 2 * MAX_TOLD_CHARS]}..."
        sys.stdout.write(f"{verdict.item:<{width}}  {verdict.word:<7}  {told}".rstrip() + "\n")
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
        word: sum(verdict.word == word for verdict in verdicts)
        for word in ("right", "wrong", "failed", "missing", "twice")
    }
    rest = ", ".join(f"{count} {word}" for word, count in counts.items() if count and word != "right")
    sys.stdout.write(f"{counts['right']} of {len(verdicts)} right{f'; {rest}' if rest else ''}\n")
    return counts["right"] == len(verdicts) and not notes


def _printable(text: str) -> str:
    """What a model wrote must not drive the terminal."""
    return "".join(char if char.isprintable() else " " for char in text)


def run_check(
    folder: Path, description: str, build_judge: Callable[[argparse.Namespace], Judge], *, needs_artifacts: bool = False
) -> int:
    """The whole program of a check.py: 0 all right, 1 not all, 2 nothing could be judged."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("output", type=Path, metavar="OUT.jsonl", help="what the batch wrote with --output")
    parser.add_argument(
        "--expected", type=Path, default=folder / "expected.jsonl", help="default: the one beside this script"
    )
    parser.add_argument(
        "--artifacts", type=Path, metavar="DIR", required=needs_artifacts, help="where the batch put the items' files"
    )
    asked = parser.parse_args()
    try:
        expected = read_jsonl(asked.expected, "make it first, as the README beside it tells")
        output = read_output(asked.output)
        verdicts = judge_all(expected, output, build_judge(asked))
    except CannotCheck as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0 if print_table(verdicts, output) else 1
