#!/usr/bin/env python3
"""What tables hold: `{"files": [...], "top": n}` on standard input, one JSON object on standard output. Standard
library only.
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
    """What has been seen of one."""

    def __init__(self):
        self.missing = 0
        self.kinds = Counter()
        self.values = Counter()
        self.is_capped = False
        self.least = self.most = None
        self.sum = 0.0

    def add(self, value):
        text = "" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        text = text.strip()
        if text.lower() in MISSING:
            self.missing += 1
            return
        kind = kind_of(text)
        self.kinds[kind] += 1
        if text in self.values or len(self.values) < MAX_DISTINCT:
            self.values[text[:MAX_SHOWN_CHARS]] += 1
        else:
            self.is_capped = True
        if kind in ("integer", "number"):
            number = int(text) if kind == "integer" else float(text)
            self.sum += number
            self.note(number)
        elif kind == "date":
            self.note(text)

    def note(self, value):
        if self.least is not None and type(self.least) is not type(value) and str in (type(self.least), type(value)):
            return  # dates among numbers: they have no common range
        self.least = value if self.least is None or value < self.least else self.least
        self.most = value if self.most is None or value > self.most else self.most

    def type(self):
        kinds = set(self.kinds)
        if not kinds:
            return "empty"
        if kinds == {"integer", "number"}:
            return "number"
        return kinds.pop() if len(kinds) == 1 else "mixed"

    def told(self, name, top):
        kind = self.type()
        told = {"name": name, "type": kind, "missing": self.missing, "distinct": len(self.values)}
        if self.is_capped:
            told["distinct_is_more"] = True
        if kind == "mixed":
            told["kinds"] = dict(self.kinds.most_common())
        if kind in ("integer", "number", "date"):
            told |= {"least": self.least, "most": self.most}
        if kind in ("integer", "number"):
            told["mean"] = round(self.sum / sum(self.kinds.values()), 6)
        if top:
            told["top"] = [
                [value, count] for value, count in sorted(self.values.items(), key=lambda one: (-one[1], one[0]))[:top]
            ]
        return told


def kind_of(text):
    if INTEGER.fullmatch(text):
        # A leading zero says that it is a code.
        return "text" if len(text) > 1 and text.startswith("0") else "integer"
    if NUMBER.fullmatch(text) and math.isfinite(float(text)):
        return "number"
    if DATE.fullmatch(text):
        return "date"
    return "boolean" if text.lower() in ("true", "false") else "text"


class Notes:
    """What was odd, the first of it by line."""

    def __init__(self):
        self.lines, self.count = [], 0

    def add(self, text):
        self.count += 1
        if self.count <= MAX_NOTES:
            self.lines.append(text)

    def told(self):
        return [*self.lines, *([f"and {self.count - MAX_NOTES} more"] if self.count > MAX_NOTES else [])]


def rows_of_csv(file, notes):
    """(column, value) pairs of each row."""
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


def rows_of_json(file, notes):
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


def profile(path, top):
    columns, rows, notes = {}, 0, Notes()
    try:
        with open(path, encoding="utf-8-sig", errors="replace", newline="") as file:
            first = file.read(1)
            file.seek(0)
            read = rows_of_json if first == "{" else rows_of_csv
            for row in read(file, notes):
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
    told = {"rows": rows, "columns": [column.told(name, top) for name, column in columns.items()]}
    return {**told, "notes": notes.told()} if notes.count else told


def main():
    try:
        asked = json.load(sys.stdin)
        files, top = asked["files"], asked.get("top", 3)
    except (ValueError, TypeError, KeyError):
        sys.exit('give {"files": [names of files]} on standard input')
    if not isinstance(files, list) or not files or not isinstance(top, int) or not 0 <= top <= 20:
        sys.exit('give {"files": [names of files], "top": a number from 0 to 20}')
    json.dump({str(path): profile(str(path), top) for path in files}, sys.stdout, ensure_ascii=False, indent=1)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
