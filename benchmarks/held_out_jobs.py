"""Second set of small jobs with verifiable results, of other kinds and in other words than `job_set`.

No text of toolcrew is adjusted to these jobs: the set shows whether texts that help with the first set also help with
jobs that were never tried before. Do not read the failures of this set to change a prompt.
"""

import base64
import codecs
import gzip
import io
import json
import random
import tarfile
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence

from benchmarks.job_set import Files, Job

KINDS = ("transform", "pack", "organize", "report", "script", "decode")

_RUN = """\
import subprocess, sys


def run(*argv, text=""):
    return subprocess.run(argv, input=text, capture_output=True, text=True, check=True).stdout


"""
"""The start of a check that runs a program."""

_FRUIT = ["apple", "banana", "cherry", "fig", "grape", "kiwi", "lemon", "mango", "melon", "olive", "peach", "pear"]
_TEAMS = ["red", "green", "blue", "yellow"]
_STATES = ["open", "closed", "waiting"]
_FIRST = ["Ana", "Boris", "Chen", "Dora", "Emil", "Fatma", "Goran", "Hana", "Igor", "Jana"]
_LAST = ["Adler", "Brandt", "Costa", "Dietz", "Ebner", "Frank", "Gruber", "Huber"]


def build_held_out_jobs() -> list[Job]:
    """Return all jobs, by kind, level and variant."""
    makers: Mapping[str, Callable[[random.Random], Sequence[Job]]] = {
        "transform": _transform,
        "pack": _pack,
        "organize": _organize,
        "report": _report,
        "script": _script,
        "decode": _decode,
    }
    return [job for kind in KINDS for job in makers[kind](random.Random(f"held out {kind}"))]


def _number(
    kind: str, jobs: Sequence[tuple[str, Files, str | Mapping[str, bytes | None] | tuple[str, bytes]]]
) -> list[Job]:
    """Number the jobs of a kind: two of each level.

    The third value of a job is the text of the answer, the content of files, or a command with the file check.py.
    """
    numbered = []
    for number, (instruction, files, expected) in enumerate(jobs):
        level, variant = number // 2 + 1, number % 2
        if isinstance(expected, str):
            job = Job(kind, level, variant, instruction, files, answer=expected)
        elif isinstance(expected, tuple):
            command, check = expected
            job = Job(kind, level, variant, instruction, files, check=command, check_files={"check.py": check})
        else:
            job = Job(kind, level, variant, instruction, files, expected=expected)
        numbered.append(job)
    return numbered


# --- Files ------------------------------------------------------------------------------------------------------------


def _lines(lines: Sequence[object]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()


def _people(rng: random.Random, count: int) -> list[str]:
    return rng.sample([f"{first} {last}" for first in _FIRST for last in _LAST], count)


def _stock(rng: random.Random) -> dict[str, int]:
    return {fruit: rng.randint(2, 90) for fruit in rng.sample(_FRUIT, 8)}


def _tickets(rng: random.Random, count: int) -> list[dict[str, object]]:
    return [
        {"id": 100 + number, "team": rng.choice(_TEAMS), "state": rng.choice(_STATES), "hours": rng.randint(1, 40)}
        for number in range(count)
    ]


def _tsv(rows: Sequence[Mapping[str, object]]) -> bytes:
    return _lines(["\t".join(rows[0]), *("\t".join(map(str, row.values())) for row in rows)])


def _tar(files: Files) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for path, content in files.items():
            member = tarfile.TarInfo(path)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return gzip.compress(out.getvalue(), mtime=0)


# --- Kinds ------------------------------------------------------------------------------------------------------------


def _transform(rng: random.Random) -> list[Job]:
    people, stock, tickets = _people(rng, 9), _stock(rng), _tickets(rng, 14)
    poem = [" ".join(rng.sample(_FRUIT, 4)) for _ in range(7)]
    pairs = {fruit: str(count) for fruit, count in stock.items()}
    by_last = sorted(people, key=lambda person: person.split()[1] + person.split()[0])
    return _number(
        "transform",
        [
            (
                "I need shout.txt: the same text as poem.txt, but everything in capital letters.",
                {"poem.txt": _lines(poem)},
                {"shout.txt": _lines([line.upper() for line in poem])},
            ),
            (
                "Please turn poem.txt upside down, last line first, and save the result as reversed.txt.",
                {"poem.txt": _lines(poem)},
                {"reversed.txt": _lines(poem[::-1])},
            ),
            (
                "people.txt lists one person per line as `First Last`. Produce people2.txt where every line reads "
                "`Last, First` instead, in the same order.",
                {"people.txt": _lines(people)},
                {"people2.txt": _lines([", ".join(person.split()[::-1]) for person in people])},
            ),
            (
                "stock.txt holds lines such as `apple=3`. Convert it: in stock.csv each of those lines should be "
                "`apple,3`, and nothing else should change.",
                {"stock.txt": _lines([f"{name}={count}" for name, count in pairs.items()])},
                {"stock.csv": _lines([f"{name},{count}" for name, count in pairs.items()])},
            ),
            (
                "Our importer wants commas. Rewrite tickets.tsv (tab separated) as tickets.csv with commas between the "
                "fields, heading included.",
                {"tickets.tsv": _tsv(tickets)},
                {"tickets.csv": _tsv(tickets).replace(b"\t", b",")},
            ),
            (
                "Alphabetical list wanted! Take people.txt (each line: first name, a space, last name), order it by "
                "last name, ties by first name, and leave the result in ordered.txt with the lines otherwise as "
                "they are.",
                {"people.txt": _lines(people)},
                {"ordered.txt": _lines(by_last)},
            ),
            (
                "Make inventory.json out of stock.txt. It must be one JSON object; its keys are the names left of the "
                "equals sign, its values the numbers right of it, as numbers rather than strings.",
                {"stock.txt": _lines([f"{name}={count}" for name, count in stock.items()])},
                (
                    "python3 check.py",
                    f"import json\nassert json.load(open('inventory.json')) == {stock!r}\n".encode(),
                ),
            ),
            (
                "tickets.json is an array of objects. Write ids.txt with the `id` of each ticket whose `state` "
                "is open, "
                "one per line, in the order of the file.",
                {"tickets.json": json.dumps(tickets, indent=1).encode()},
                {"ids.txt": _lines([row["id"] for row in tickets if row["state"] == "open"])},
            ),
        ],
    )


def _pack(rng: random.Random) -> list[Job]:
    letters = {f"letters/{name.lower()}.txt": _lines(_people(rng, 3)) for name in rng.sample(_FIRST, 5)}
    secret = rng.choice(_FRUIT)
    bundle = {"docs/readme.txt": b"Read me first.\n", "docs/word.txt": f"{secret}\n".encode()}
    log = _lines([f"{number} {rng.choice(_TEAMS)} {rng.choice(_STATES)}" for number in range(rng.randint(30, 60))])
    unpacked = (
        "import tarfile\nnames = tarfile.open('{}').getnames()\nnames = {{name.removeprefix('./') for name in names}}\n"
    )
    return _number(
        "pack",
        [
            (
                "Unpack bundle.tar.gz here.",
                {"bundle.tar.gz": _tar(bundle)},
                {path: content for path, content in bundle.items()},
            ),
            (
                "Someone sent events.log.gz. Decompress it so that events.log exists.",
                {"events.log.gz": gzip.compress(log, mtime=0)},
                {"events.log": log},
            ),
            (
                "Inside bundle.tar.gz there is a file docs/word.txt. What does it say?",
                {"bundle.tar.gz": _tar(bundle)},
                secret,
            ),
            (
                "Without keeping a decompressed copy around: how many lines does the compressed file "
                "events.log.gz hold?",
                {"events.log.gz": gzip.compress(log, mtime=0)},
                str(log.count(b"\n")),
            ),
            (
                "Put the whole folder `letters` into an archive called letters.tar.gz (gzip-compressed tar).",
                letters,
                (
                    "python3 check.py",
                    f"{unpacked.format('letters.tar.gz')}assert names >= {set(letters)!r}\n".encode(),
                ),
            ),
            (
                "Zip up everything in `letters` as letters.zip, please; the folder itself stays.",
                letters,
                (
                    "python3 check.py",
                    (
                        "import zipfile\nnames = {n.split('/')[-1] for n in "
                        "zipfile.ZipFile('letters.zip').namelist()}\n"
                        f"assert names >= { {path.split('/')[-1] for path in letters}!r}\n"
                    ).encode(),
                ),
            ),
            (
                "One file in parts.tar.gz is bigger than all others. Tell me its name.",
                {
                    "parts.tar.gz": _tar(
                        {f"parts/{fruit}.bin": b"x" * (900 if fruit == secret else 10 + len(fruit)) for fruit in _FRUIT}
                    )
                },
                secret,
            ),
            (
                "Split numbers.txt, which has 60 lines, into three files of 20 lines each, in order: part1.txt, "
                "part2.txt, part3.txt.",
                {"numbers.txt": _lines(range(500, 560))},
                {f"part{n + 1}.txt": _lines(range(500 + 20 * n, 520 + 20 * n)) for n in range(3)},
            ),
        ],
    )


def _organize(rng: random.Random) -> list[Job]:
    mixed = {
        f"{fruit}.{suffix}": f"{fruit}\n".encode()
        for fruit, suffix in zip(_FRUIT, ["jpg", "txt", "log"] * 4, strict=True)
    }
    doubles = {f"{fruit}.dat": f"{rng.randint(100, 999)}\n".encode() for fruit in _FRUIT[:6]}
    doubles["zz-copy.dat"] = doubles["fig.dat"]
    reports = {f"report {name}.txt": f"{name}\n".encode() for name in _TEAMS}
    empty = rng.sample(sorted(mixed), 3)
    with_empty = {path: b"" if path in empty else content for path, content in mixed.items()}
    years = {f"photo-{year}-{n:02d}.jpg": f"{year} {n}\n".encode() for year in (2023, 2024) for n in (1, 2, 3)}
    return _number(
        "organize",
        [
            (
                "There should be a folder named `archive` with a copy of notes.md in it. Keep the original.",
                {"notes.md": b"# Notes\n\nBuy pears.\n"},
                {"archive/notes.md": b"# Notes\n\nBuy pears.\n", "notes.md": b"# Notes\n\nBuy pears.\n"},
            ),
            (
                "Get rid of draft.txt.",
                {"draft.txt": b"old\n", "final.txt": b"new\n"},
                {"draft.txt": None, "final.txt": b"new\n"},
            ),
            (
                "Move all pictures (*.jpg) into a new folder called pictures.",
                mixed,
                {path if not path.endswith(".jpg") else f"pictures/{path}": content for path, content in mixed.items()}
                | {path: None for path in mixed if path.endswith(".jpg")},
            ),
            (
                "Some of the files here are empty (zero bytes). Remove exactly those.",
                with_empty,
                {path: None if path in empty else content for path, content in with_empty.items()},
            ),
            (
                "The file names contain spaces, which breaks our tools. In every name, put an underscore where "
                "there is a "
                "space.",
                reports,
                {path.replace(" ", "_"): content for path, content in reports.items()} | dict.fromkeys(reports),
            ),
            (
                "Sort the photos into one folder per year, named after the year, for instance 2023/photo-2023-01.jpg.",
                years,
                {f"{path[6:10]}/{path}": content for path, content in years.items()} | dict.fromkeys(years),
            ),
            (
                "Two of these .dat files have the same content. Which two? Name both, in alphabetical order, "
                "like: a.dat "
                "and b.dat",
                doubles,
                "fig.dat and zz-copy.dat",
            ),
            (
                "Give every .log file here the prefix `old-`; a file x.log becomes old-x.log. Touch nothing else.",
                mixed,
                {f"old-{path}" if path.endswith(".log") else path: content for path, content in mixed.items()}
                | {path: None for path in mixed if path.endswith(".log")},
            ),
        ],
    )


def _report(rng: random.Random) -> list[Job]:
    tickets = _tickets(rng, 40)
    tsv = {"tickets.tsv": _tsv(tickets)}
    hours: dict[str, int] = defaultdict(int)
    for row in tickets:
        hours[str(row["team"])] += int(str(row["hours"]))
    states = Counter(str(row["state"]) for row in tickets)
    closed = [row for row in tickets if row["state"] == "closed"]
    most = max(closed, key=lambda row: (int(str(row["hours"])), -int(str(row["id"]))))
    most["hours"] = 77
    tsv = {"tickets.tsv": _tsv(tickets)}
    hours = defaultdict(int)
    for row in tickets:
        hours[str(row["team"])] += int(str(row["hours"]))
    shop = {
        f"shop/{team}.txt": _lines([rng.choice(_FRUIT) for _ in range(12)] + ["quince"] * n)
        for n, team in enumerate(_TEAMS)
    }
    temperatures = [rng.randint(-15, 35) for _ in range(31)]
    return _number(
        "report",
        [
            (
                "The temperatures of July are in july.txt, one per line. What was the lowest?",
                {"july.txt": _lines(temperatures)},
                str(min(temperatures)),
            ),
            (
                "On how many days of july.txt (one temperature per line) was it warmer than 20 degrees?",
                {"july.txt": _lines(temperatures)},
                str(sum(value > 20 for value in temperatures)),
            ),
            (
                "tickets.tsv: columns id, team, state, hours, separated by tabs. How many tickets belong to the "
                "team blue?",
                tsv,
                str(sum(row["team"] == "blue" for row in tickets)),
            ),
            (
                "Which of the text files in shop mentions quince most often? The name of the file is enough.",
                shop,
                "yellow",
            ),
            (
                "In tickets.tsv (id, team, state, hours; tab separated) look only at the closed tickets. Which "
                "id has the "
                "most hours?",
                tsv,
                str(most["id"]),
            ),
            (
                "How many hours did the team green book in total? See tickets.tsv; its columns are id, team, state and "
                "hours, with tabs between them.",
                tsv,
                str(hours["green"]),
            ),
            (
                "I want a summary of tickets.tsv (tab separated: id, team, state, hours). For each state write "
                "one line "
                "`state count` to states.txt, sorted by the name of the state.",
                tsv,
                {"states.txt": _lines([f"{state} {states[state]}" for state in sorted(states)])},
            ),
            (
                "Add up the hours of tickets.tsv per team (columns: id, team, state, hours; tabs). hours.txt "
                "gets a line "
                "`team:hours` for each team, teams in alphabetical order.",
                tsv,
                {"hours.txt": _lines([f"{team}:{hours[team]}" for team in sorted(hours)])},
            ),
        ],
    )


def _script(rng: random.Random) -> list[Job]:
    low, high = rng.randint(2, 9), rng.randint(12, 30)
    evens = [str(number * 2) for number in range(low, high + 1)]

    def check(lines: str) -> tuple[str, bytes]:
        return "python3 check.py", f"{_RUN}{lines}".encode()

    return _number(
        "script",
        [
            (
                "Write a shell script hi.sh that prints: hi there",
                {},
                check("assert run('bash', 'hi.sh').strip() == 'hi there'\n"),
            ),
            (
                "I'd like a Python program, square.py, which takes a whole number as its argument and prints the "
                "square of it.",
                {},
                check("assert run(sys.executable, 'square.py', '12').strip() == '144'\n"),
            ),
            (
                f"Create evens.py. When run, it prints the even numbers from {low * 2} to {high * 2}, both "
                f"included, each on "
                "its own line.",
                {},
                check(f"assert run(sys.executable, 'evens.py').split() == {evens!r}\n"),
            ),
            (
                "We need a module temperature.py with a function to_celsius(fahrenheit) that converts degrees.",
                {},
                check(
                    "from temperature import to_celsius\nassert abs(to_celsius(212) - 100) < 1e-6\nassert "
                    "abs(to_celsius(50) - 10) < 1e-6\n"
                ),
            ),
            (
                "Program total.py shall read numbers from standard input, one per line, and print their sum.",
                {},
                check("assert float(run(sys.executable, 'total.py', text='4\\n5\\n10\\n')) == 19\n"),
            ),
            (
                "Write text.py with a function is_palindrome(text). Upper and lower case count as equal, and "
                "spaces are "
                "ignored.",
                {},
                check(
                    "from text import is_palindrome\nassert is_palindrome('Never odd or even')\nassert not "
                    "is_palindrome('Never even')\nassert is_palindrome('')\n"
                ),
            ),
            (
                "count.sh should print how many files (not folders) lie in the folder that is its first argument, "
                "subfolders included. Write it for bash.",
                {"box/a.txt": b"a\n", "box/in/b.txt": b"b\n", "box/in/c.txt": b"c\n"},
                check(
                    "assert run('bash', 'count.sh', 'box').strip() == '3'\nassert run('bash', 'count.sh', "
                    "'box/in').strip() == '2'\n"
                ),
            ),
            (
                "Please implement roman.py: roman(number) returns the Roman numeral of an integer between 1 and "
                "3999 as a "
                "string.",
                {},
                check(
                    "from roman import roman\nassert roman(1994) == 'MCMXCIV'\nassert roman(4) == 'IV'\nassert "
                    "roman(3999) == "
                    "'MMMCMXCIX'\n"
                ),
            ),
        ],
    )


def _decode(rng: random.Random) -> list[Job]:
    words = [" ".join(rng.sample(_FRUIT, 3)) for _ in range(4)]
    settings = {"name": "demo", "debug": False, "retries": rng.randint(2, 9), "hosts": rng.sample(_TEAMS, 3)}
    debugged = {**settings, "debug": True}
    hidden = rng.randint(10_000, 99_999)
    seconds = rng.randint(4_000, 80_000)
    chain = {f"step{n}.txt": f"step{n + 1}.txt\n".encode() for n in range(1, 4)} | {
        "step4.txt": f"{words[3]}\n".encode()
    }
    return _number(
        "decode",
        [
            (
                "message.b64 is base64. What is the message?",
                {"message.b64": base64.b64encode(words[0].encode()) + b"\n"},
                words[0],
            ),
            (
                "Encode plain.txt in base64 and store that as plain.b64 on a single line.",
                {"plain.txt": words[1].encode()},
                {"plain.b64": base64.b64encode(words[1].encode())},
            ),
            (
                "rot13.txt was written with ROT13. Save the readable text as clear.txt.",
                {"rot13.txt": f"{codecs.encode(words[2], 'rot13')}\n".encode()},
                {"clear.txt": f"{words[2]}\n".encode()},
            ),
            (
                "How many retries does settings.json configure?",
                {"settings.json": json.dumps(settings).encode()},
                str(settings["retries"]),
            ),
            (
                "Switch debugging on in settings.json: the value of `debug` has to be true. The file must stay "
                "valid JSON "
                "with the other values unchanged.",
                {"settings.json": json.dumps(settings).encode()},
                (
                    "python3 check.py",
                    f"import json\nassert json.load(open('settings.json')) == {debugged!r}\n".encode(),
                ),
            ),
            (
                "hex.txt holds the bytes of a text as hexadecimal digits. Which text is it?",
                {"hex.txt": words[1].encode().hex().encode() + b"\n"},
                words[1],
            ),
            (
                "duration.txt contains a number of seconds. Express it as hours, minutes and seconds in the form "
                "H:MM:SS.",
                {"duration.txt": f"{seconds}\n".encode()},
                f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}",
            ),
            (
                "Read step1.txt: it names the next file, which names the next one, and so on. What does the last "
                "file say?",
                {**chain, "step9.txt": f"{hidden}\n".encode()},
                words[3],
            ),
        ],
    )
