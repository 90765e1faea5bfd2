#!/usr/bin/env python3
"""Describe tables: reads `{"files": [...], "top": n}` from standard input, writes one JSON object to standard output.

Uses only the standard library.
"""

import csv
import json
import math
import re
import sys
from collections import Counter

MAX_DISTINCT, MAX_COLUMNS, MAX_SHOWN_CHARS, MAX_NOTES = 10_000, 500, 80, 10
SAMPLE_CHARS = 64 * 1024
INTEGER, NUMBER = re.compile(r"[+-]?\d{1,18}"), re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,3})?")
DATE = re.compile(r"\d{4}-\d{2}-\d{2}([T ]\d{2}:\d{2}(:\d{2}(\.\d+)?)?(Z|[+-]\d{2}:?\d{2})?)?")
MISSING = frozenset({"", "na", "n/a", "nan", "null", "none"})


class Column:
    """Statistics of one column."""

    def __init__(self):
        self.missing = 0
        self.kinds = Counter()
        self.values = Counter()
        self.is_capped = False
        self.minimum = self.maximum = None
        self.sum = 0.0

    def add(self, value):
        text = "" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        text = text.strip()
        if text.lower() in MISSING:
            self.missing += 1
            return
        kind = find_kind(text)
        self.kinds[kind] += 1
        if text in self.values or len(self.values) < MAX_DISTINCT:
            self.values[text[:MAX_SHOWN_CHARS]] += 1
        else:
            self.is_capped = True
        if kind in ("integer", "number"):
            number = int(text) if kind == "integer" else float(text)
            self.sum += number
            self.add_to_range(number)
        elif kind == "date":
            self.add_to_range(text)

    def add_to_range(self, value):
        if (
            self.minimum is not None
            and type(self.minimum) is not type(value)
            and str in (type(self.minimum), type(value))
        ):
            return  # Dates and numbers have no common range.
        self.minimum = value if self.minimum is None or value < self.minimum else self.minimum
        self.maximum = value if self.maximum is None or value > self.maximum else self.maximum

    def find_type(self):
        kinds = set(self.kinds)
        if not kinds:
            return "empty"
        if kinds == {"integer", "number"}:
            return "number"
        return kinds.pop() if len(kinds) == 1 else "mixed"

    def to_dict(self, name, top):
        kind = self.find_type()
        summary = {"name": name, "type": kind, "missing": self.missing, "distinct": len(self.values)}
        if self.is_capped:
            summary["distinct_is_more"] = True
        if kind == "mixed":
            summary["kinds"] = dict(self.kinds.most_common())
        if kind in ("integer", "number", "date"):
            summary |= {"least": self.minimum, "most": self.maximum}
        if kind in ("integer", "number"):
            summary["mean"] = round(self.sum / sum(self.kinds.values()), 6)
        if top:
            summary["top"] = [
                [value, count]
                for value, count in sorted(self.values.items(), key=lambda item: (-item[1], item[0]))[:top]
            ]
        return summary


def find_kind(text):
    if INTEGER.fullmatch(text):
        # A number with a leading zero is a code, not a quantity.
        return "text" if len(text) > 1 and text.startswith("0") else "integer"
    if NUMBER.fullmatch(text) and math.isfinite(float(text)):
        return "number"
    if DATE.fullmatch(text):
        return "date"
    return "boolean" if text.lower() in ("true", "false") else "text"


class Notes:
    """Problems of a file. Only the first MAX_NOTES are listed."""

    def __init__(self):
        self.lines, self.count = [], 0

    def add(self, text):
        self.count += 1
        if self.count <= MAX_NOTES:
            self.lines.append(text)

    def to_dict(self):
        return [*self.lines, *([f"and {self.count - MAX_NOTES} more"] if self.count > MAX_NOTES else [])]


def read_csv_rows(file, notes):
    """Yield each row as a list of (column, value) pairs."""
    sample = file.read(SAMPLE_CHARS)
    file.seek(0)
    try:
        dialect = csv.Sniffer().sniff(sample, ",;\t|")
    except csv.Error:
        dialect = csv.excel_tab if "\t" in sample.split("\n")[0] else csv.excel
    reader = csv.reader(file, dialect)
    head = next(reader, [])[:MAX_COLUMNS]
    names = [name.strip() or f"column {number}" for number, name in enumerate(head, start=1)]
    names = [name if names.index(name) == at else f"{name} ({at + 1})" for at, name in enumerate(names)]
    for row in reader:
        if not row:
            continue
        if len(row) != len(names):
            notes.add(f"line {reader.line_num} has {len(row)} cells, the head has {len(names)}")
        yield [(name, row[at] if at < len(row) else None) for at, name in enumerate(names)]


def read_json_rows(file, notes):
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict):
            yield list(row.items())[:MAX_COLUMNS]
        else:
            notes.add(f"line {number} is no JSON object")


def build_profile(path, top):
    columns, rows, notes = {}, 0, Notes()
    try:
        with open(path, encoding="utf-8-sig", errors="replace", newline="") as file:
            first = file.read(1)
            file.seek(0)
            read_rows = read_json_rows if first == "{" else read_csv_rows
            for row in read_rows(file, notes):
                rows += 1
                for name, value in row:
                    if name not in columns:
                        columns[name] = Column()
                        columns[name].missing = rows - 1
                    columns[name].add(value)
                for name in columns.keys() - {name for name, _ in row}:
                    columns[name].missing += 1
    except OSError as error:
        return {"error": error.strerror}
    except csv.Error as error:
        return {"error": f"it is no CSV: {error}"}
    summary = {"rows": rows, "columns": [column.to_dict(name, top) for name, column in columns.items()]}
    return {**summary, "notes": notes.to_dict()} if notes.count else summary


def main():
    try:
        request = json.load(sys.stdin)
        files, top = request["files"], request.get("top", 3)
    except (ValueError, TypeError, KeyError):
        sys.exit('give {"files": [names of files]} on standard input')
    if not isinstance(files, list) or not files or not isinstance(top, int) or not 0 <= top <= 20:
        sys.exit('give {"files": [names of files], "top": a number from 0 to 20}')
    json.dump({str(path): build_profile(str(path), top) for path in files}, sys.stdout, ensure_ascii=False, indent=1)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
