"""Small jobs with verifiable results, in five kinds and four levels of difficulty. The jobs are the same on every
machine.
"""

import csv
import hashlib
import io
import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

KINDS = ("count", "find", "edit", "compute", "fix")
LEVELS = (1, 2, 3, 4)
VARIANTS = 2
"""Number of jobs of each kind and level."""

Files = Mapping[str, bytes]
"""Content by path in the workspace."""

_WORDS = [
    "amber",
    "basin",
    "cedar",
    "delta",
    "ember",
    "fjord",
    "grove",
    "haven",
    "inlet",
    "jetty",
    "knoll",
    "ledge",
    "marsh",
    "north",
    "ocean",
    "plume",
    "quarry",
    "ridge",
    "shore",
    "tidal",
    "upland",
    "valley",
    "willow",
    "yonder",
]
_PEOPLE = [
    "alice",
    "bob",
    "carol",
    "dave",
    "erin",
    "frank",
    "grace",
    "heidi",
    "ivan",
    "judy",
    "mallory",
    "niaj",
    "olivia",
    "peggy",
    "rupert",
    "sybil",
]
_CITIES = ["paris", "madrid", "berlin", "rome", "oslo", "vienna", "lisbon", "prague"]
_LOG_LEVELS = ("INFO", "WARN", "ERROR", "DEBUG")


@dataclass(frozen=True)
class Job:
    """Job with a verifiable result.

    `answer`: the text that the final answer must contain; None accepts any answer. `expected`: the content by path
    that the workspace must have at the end; None means that the file must not exist. `check`: a shell command that
    succeeds in the final workspace. `check_files`: additional files for the check, which the model does not see.
    """

    kind: str
    level: int
    variant: int
    instruction: str
    files: Files
    answer: str | None = None
    expected: Mapping[str, bytes | None] = field(default_factory=dict)
    check: str | None = None
    check_files: Files = field(default_factory=dict)

    @property
    def id(self) -> str:
        return f"{self.kind}-{self.level}{'ab'[self.variant]}"

    def explain_failure(self, answer: str, files: Files) -> str | None:
        """Return why the result is a failure, or None for a success. `files`: the workspace at the end. The caller
        runs `check`.
        """
        for path, content in self.expected.items():
            if content is None and path in files:
                return "wrong file"
            if content is not None and _normalize(files.get(path, b"\0")) != _normalize(content):
                return "wrong file" if path in files else "no file"
        if self.answer is not None and not contains(answer, self.answer):
            return "wrong answer" if answer.strip() else "no answer"
        return None


def contains(answer: str, expected: str) -> bool:
    """Return whether an answer contains the value, but not as part of a longer number or word."""
    text = re.sub(r"(?<=\d),(?=\d{3})", "", answer)
    return re.search(rf"(?<![\w.]){re.escape(expected)}(?!\w|\.\d)", text, re.IGNORECASE) is not None


def build_jobs() -> list[Job]:
    """Return all jobs, by kind, level and variant."""
    makers: Mapping[str, Callable[[int, int, random.Random], Job]] = {
        "count": _count,
        "find": _find,
        "edit": _edit,
        "compute": _compute,
        "fix": _fix,
    }
    return [
        makers[kind](level, variant, random.Random(f"{kind} {level} {variant}"))
        for kind in KINDS
        for level in LEVELS
        for variant in range(VARIANTS)
    ]


def _normalize(content: bytes) -> bytes:
    """Return the content without trailing whitespace, because no instruction mentions trailing whitespace."""
    return content.rstrip()


# --- Files ------------------------------------------------------------------------------------------------------------


def _text(rng: random.Random, lines: int) -> bytes:
    return "".join(" ".join(rng.choices(_WORDS, k=rng.randint(3, 9))) + ".\n" for _ in range(lines)).encode()


def _log_lines(rng: random.Random, lines: int) -> list[str]:
    return [
        f"2026-03-{rng.randint(1, 28):02d} {rng.choice(_LOG_LEVELS)} {rng.choice(_WORDS)}: {rng.choice(_PEOPLE)} took "
        f"{rng.randint(2, 900)} ms"
        for _ in range(lines)
    ]


def _table(rng: random.Random, rows: int) -> list[dict[str, str]]:
    return [
        {
            "name": rng.choice(_PEOPLE),
            "city": rng.choice(_CITIES),
            "amount": str(rng.randint(5, 950)),
            "status": rng.choice(("ok", "failed")),
        }
        for _ in range(rows)
    ]


def _as_csv(rows: Sequence[Mapping[str, str]]) -> bytes:
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue().encode()


def _lines(lines: Sequence[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()


def _source_tree(rng: random.Random) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    for folder in ("src", "src/core", "src/web", "tests"):
        for name in rng.sample(_WORDS, 3):
            functions = [
                f"def {word}(value):\n    return value + {rng.randint(1, 9)}\n" for word in rng.sample(_WORDS, 2)
            ]
            files[f"{folder}/{name}.py"] = "\n\n".join(functions).encode()
        files[f"{folder}/README.md"] = _text(rng, 3)
    return files


# --- Kinds ------------------------------------------------------------------------------------------------------------


def _count(level: int, variant: int, rng: random.Random) -> Job:
    table, log, tree = _table(rng, rng.randint(30, 60)), _log_lines(rng, rng.randint(40, 90)), _source_tree(rng)
    text = _text(rng, rng.randint(12, 30))
    python = {path: content for path, content in tree.items() if path.endswith(".py")}
    options: Mapping[tuple[int, int], tuple[str, Files, int]] = {
        (1, 0): ("How many lines does the file app.log have?", {"app.log": _lines(log)}, len(log)),
        (1, 1): ("How many words are in notes.txt?", {"notes.txt": text}, len(text.split())),
        (2, 0): (
            "How many lines of app.log contain the word ERROR?",
            {"app.log": _lines(log)},
            sum("ERROR" in line for line in log),
        ),
        (2, 1): ("How many files with the suffix .py are there, in all folders together?", tree, len(python)),
        (3, 0): (
            "How many different names are in the column `name` of table.csv? The first line is the header.",
            {"table.csv": _as_csv(table)},
            len({row["name"] for row in table}),
        ),
        (3, 1): (
            "How many lines do all .py files in all folders have together?",
            tree,
            sum(content.count(b"\n") for content in python.values()),
        ),
        (4, 0): (
            "How many rows of table.csv have the status failed and an amount above 500? The columns are name, city, "
            "amount, status.",
            {"table.csv": _as_csv(table)},
            sum(row["status"] == "failed" and int(row["amount"]) > 500 for row in table),
        ),
        (4, 1): (
            "How many Python functions (lines that begin with `def `) are defined below src, without the folder "
            "src/web?",
            tree,
            sum(
                content.count(b"def ")
                for path, content in python.items()
                if path.startswith("src/") and not path.startswith("src/web/")
            ),
        ),
    }
    instruction, files, expected = options[level, variant]
    return Job("count", level, variant, instruction, files, str(expected))


def _find(level: int, variant: int, rng: random.Random) -> Job:
    notes = {f"notes/{word}.txt": _text(rng, rng.randint(5, 12)) for word in rng.sample(_WORDS, 10)}
    hidden = rng.choice(sorted(notes))
    with_code = {**notes, hidden: notes[hidden] + b"The code is kestrel.\n"}
    table, tree = _table(rng, 40), _source_tree(rng)
    best = max(range(40), key=lambda number: int(table[number]["amount"]))
    table[best] = {**table[best], "name": "wendeline", "amount": "990"}
    place = rng.choice([path for path in tree if path.endswith(".py")])
    tree[place] += b"\n\ndef parse_amount(text):\n    return int(text)\n"
    plain = _log_lines(rng, 50)
    line = rng.randint(10, 45)
    log = [text if number != line else f"{text} TODO check" for number, text in enumerate(plain, 1)]
    ports = {word: str(rng.randint(1000, 9000)) for word in rng.sample(_WORDS, 12)}
    changed = rng.choice(sorted(ports))
    other = {**ports, changed: "17"}
    addresses = [f"10.0.{rng.randint(0, 3)}.{rng.randint(1, 5)}" for _ in range(60)] + ["10.0.9.77"] * 15
    rng.shuffle(addresses)
    settings = {"server": {"host": "alpha", "limits": {"burst": rng.randint(100, 999), "rate": 7}}, "debug": False}
    options: Mapping[tuple[int, int], tuple[str, Files, str]] = {
        (1, 0): (
            "Which file in the folder notes contains the word kestrel? Give its name.",
            with_code,
            hidden.removeprefix("notes/").removesuffix(".txt"),
        ),
        (1, 1): (
            "What is the name of the largest file in the folder notes?",
            {**notes, hidden: notes[hidden] * 9},
            hidden.removeprefix("notes/").removesuffix(".txt"),
        ),
        (2, 0): ("On which line number of app.log is the word TODO?", {"app.log": _lines(log)}, str(line)),
        (2, 1): (
            "Which Python file defines the function parse_amount? Give its path.",
            tree,
            place,
        ),
        (3, 0): (
            "Which name has the highest amount in table.csv? The columns are name, city, amount, status.",
            {"table.csv": _as_csv(table)},
            "wendeline",
        ),
        (3, 1): (
            "What is the value of server.limits.burst in settings.json?",
            {"settings.json": json.dumps(settings).encode()},
            str(settings["server"]["limits"]["burst"]),  # type: ignore[index]
        ),
        (4, 0): (
            "old.conf and new.conf differ in one key. Which key is it?",
            {
                "old.conf": _lines([f"{key}={value}" for key, value in ports.items()]),
                "new.conf": _lines([f"{key}={value}" for key, value in sorted(other.items())]),
            },
            changed,
        ),
        (4, 1): (
            "Which IP address occurs most often in access.log? The address is the first field of each line.",
            {"access.log": _lines([f"{address} GET /{rng.choice(_WORDS)} 200" for address in addresses])},
            "10.0.9.77",
        ),
    }
    instruction, files, expected = options[level, variant]
    return Job("find", level, variant, instruction, files, expected)


def _edit(level: int, variant: int, rng: random.Random) -> Job:
    text = _text(rng, 8).decode()
    word = next(word for word in _WORDS if text.count(word) > 1)
    log, names = _log_lines(rng, 30), sorted(rng.sample(_WORDS, 4))
    shuffled = rng.choices(_WORDS, k=30)
    table = _table(rng, 20)
    old, new = "1.4.2", "1.5.0"
    versions = {
        "setup.cfg": f"[metadata]\nname = tool\nversion = {old}\n",
        "src/version.py": f'VERSION = "{old}"\n',
        "docs/index.md": f"# Tool\n\nThis is version {old}.\n",
    }
    notes = {f"{name}.txt": f"{name}\n".encode() for name in names}
    options: Mapping[tuple[int, int], tuple[str, Files, Mapping[str, bytes | None]]] = {
        (1, 0): (
            "Create the file hello.txt with the one line: good morning",
            {"notes.txt": text.encode()},
            {"hello.txt": b"good morning\n"},
        ),
        (1, 1): (
            "Append the line `the end` to notes.txt.",
            {"notes.txt": text.encode()},
            {"notes.txt": f"{text}the end\n".encode()},
        ),
        (2, 0): (
            f"Replace every `{word}` in notes.txt by `REPLACED`.",
            {"notes.txt": text.encode()},
            {"notes.txt": text.replace(word, "REPLACED").encode()},
        ),
        (2, 1): (
            "Delete all lines that contain DEBUG from app.log.",
            {"app.log": _lines(log)},
            {"app.log": _lines([line for line in log if "DEBUG" not in line])},
        ),
        (3, 0): (
            "Write the lines of words.txt, sorted and without duplicates, to sorted.txt.",
            {"words.txt": _lines(shuffled)},
            {"sorted.txt": _lines(sorted(set(shuffled)))},
        ),
        (3, 1): (
            "Rename every file with the suffix .txt so that its suffix is .md.",
            notes,
            {
                **{name.replace(".txt", ".md"): content for name, content in notes.items()},
                **dict.fromkeys(notes),
            },
        ),
        (4, 0): (
            f"The version is {old} in setup.cfg, src/version.py and docs/index.md. Change it to {new} in all three.",
            {path: content.encode() for path, content in versions.items()},
            {path: content.replace(old, new).encode() for path, content in versions.items()},
        ),
        (4, 1): (
            "Write the third column of table.csv without its header to amounts.txt, sorted as numbers, smallest first.",
            {"table.csv": _as_csv(table)},
            {"amounts.txt": _lines(sorted((row["amount"] for row in table), key=int))},
        ),
    }
    instruction, files, expected = options[level, variant]
    return Job("edit", level, variant, instruction, files, expected=expected)


def _compute(level: int, variant: int, rng: random.Random) -> Job:
    text, numbers, table = _text(rng, 10), [rng.randint(1, 999) for _ in range(25)], _table(rng, 40)
    logs = {f"logs/{name}.log": _lines(_log_lines(rng, rng.randint(3, 20))) for name in rng.sample(_WORDS, 5)}
    even = [number * 8 for number in numbers[:16]]
    city = table[0]["city"]
    options: Mapping[tuple[int, int], tuple[str, Files, str]] = {
        (1, 0): ("What is the sha256 checksum of notes.txt?", {"notes.txt": text}, hashlib.sha256(text).hexdigest()),
        (1, 1): ("How many bytes does notes.txt have?", {"notes.txt": text}, str(len(text))),
        (2, 0): (
            "What is the sum of the numbers in numbers.txt, one on each line?",
            {"numbers.txt": _lines(list(map(str, numbers)))},
            str(sum(numbers)),
        ),
        (2, 1): (
            "What is the largest number in numbers.txt?",
            {"numbers.txt": _lines(list(map(str, numbers)))},
            str(max(numbers)),
        ),
        (3, 0): (
            "What is the average of the 16 numbers in numbers.txt, one on each line?",
            {"numbers.txt": _lines(list(map(str, even)))},
            f"{sum(even) / 16:g}",
        ),
        (3, 1): (
            "What is the sum of the column amount of table.csv? The columns are name, city, amount, status.",
            {"table.csv": _as_csv(table)},
            str(sum(int(row["amount"]) for row in table)),
        ),
        (4, 0): (
            "How many bytes do all files in the folder logs have together?",
            logs,
            str(sum(map(len, logs.values()))),
        ),
        (4, 1): (
            f"What is the sum of the amounts of the rows of table.csv whose city is {city}? The columns are name, "
            "city, amount, status.",
            {"table.csv": _as_csv(table)},
            str(sum(int(row["amount"]) for row in table if row["city"] == city)),
        ),
    }
    instruction, files, expected = options[level, variant]
    return Job("compute", level, variant, instruction, files, expected)


_FIXES: Mapping[tuple[int, int], tuple[str, str, str]] = {
    (1, 0): (
        "mean.py",
        "def mean(values)\n    return sum(values) / len(values)\n",
        "from mean import mean\nassert mean([1, 2, 6]) == 3\n",
    ),
    (1, 1): (
        "greet.py",
        'def greet(name):\n    retrun "Hello, " + name\n',
        'from greet import greet\nassert greet("Ada") == "Hello, Ada"\n',
    ),
    (2, 0): (
        "last.py",
        "def last(values):\n    return values[len(values)]\n",
        'from last import last\nassert last([4, 7]) == 7\nassert last("x") == "x"\n',
    ),
    (2, 1): (
        "area.py",
        "def area(width, height):\n    return width + height\n",
        "from area import area\nassert area(3, 4) == 12\nassert area(1, 5) == 5\n",
    ),
    (3, 0): (
        "leap.py",
        "def is_leap(year):\n    return year % 4 == 0\n",
        "from leap import is_leap\nassert is_leap(2024)\nassert not is_leap(1900)\nassert is_leap(2000)\n",
    ),
    (3, 1): (
        "count.py",
        "def count_words(text):\n    return len(text.split(' '))\n",
        "from count import count_words\nassert count_words('a  b') == 2\nassert count_words('') == 0\n",
    ),
    (4, 0): (
        "fizz.py",
        "def fizz(number):\n    if number % 3 == 0:\n        return 'fizz'\n    if number % 5 == 0:\n"
        "        return 'buzz'\n    if number % 15 == 0:\n        return 'fizzbuzz'\n    return str(number)\n",
        "from fizz import fizz\nassert fizz(15) == 'fizzbuzz'\nassert fizz(9) == 'fizz'\nassert fizz(10) == 'buzz'\n"
        "assert fizz(7) == '7'\n",
    ),
    (4, 1): (
        "merge.py",
        "def merge(left, right):\n    result = []\n    while left and right:\n        if left[0] < right[0]:\n"
        "            result.append(left.pop(0))\n        else:\n            result.append(right.pop(0))\n"
        "    return result\n",
        "from merge import merge\nassert merge([1, 4], [2, 3]) == [1, 2, 3, 4]\nassert merge([], [5]) == [5]\n",
    ),
}


def _fix(level: int, variant: int, _: random.Random) -> Job:
    name, source, test = _FIXES[level, variant]
    files = {name: source.encode(), "test.py": test.encode() + b"print('all tests passed')\n"}
    return Job(
        "fix",
        level,
        variant,
        f"`python3 test.py` fails, because {name} has a fault. Fix {name}, so that the command succeeds. Do not change "
        "test.py.",
        files,
        check="python3 check.py",
        check_files={"check.py": test.encode()},
    )
