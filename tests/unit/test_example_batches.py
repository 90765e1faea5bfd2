"""The example batches: their expected answers are correct, their scripts solve them, and their checkers distinguish
right from wrong.
"""

import csv
import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest

from orchestrator.batches.lines import load_lines
from tests.model_server.in_process import TRUST_NOBODY
from tests.model_server.running import ModelServer, running_model_server
from tests.model_server.script import load_script

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
DATA, REPOSITORY, FIX = (EXAMPLES / name for name in ("data-questions", "repository-questions", "fix-the-test"))
MAX_STEPS = 5
"""The default limit of a run."""


def load_module(path: Path) -> ModuleType:
    """Load a script of the examples. Their folders do not have Python names."""
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}".replace("-", "_"), path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def build_row(item: str, answer: str) -> dict[str, Any]:
    body = {"run": f"run-{item}", "answer": answer, "stop_reason": "answered", "steps": 2}
    return {
        "id": f"run-{item}",
        "custom_id": item,
        "response": {"status_code": 200, "request_id": f"run-{item}", "body": body},
        "error": None,
    }


def write_rows(path: Path, *rows: Mapping[str, Any]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def check(folder: Path, output: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    argv = [sys.executable, "-B", str(folder / "check.py"), str(output), *arguments]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository questions with their sources, copied from the running Python."""
    folder = tmp_path_factory.mktemp("repository")
    load_module(REPOSITORY / "prepare.py").prepare(folder)
    return folder


# --- Expected answers -------------------------------------------------------------------------------------------------


class Tables:
    """The CSV files, read by Python's own reader."""

    def __getattr__(self, name: str) -> list[dict[str, str]]:
        with (DATA / "workspace" / f"{name}.csv").open(newline="") as file:
            return list(csv.DictReader(file))


MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def only(values: list[Any], key: Callable[[Any], Any]) -> Any:
    """Return the largest value, which must be unique: a question with two correct answers is invalid."""
    best = max(map(key, values))
    (found,) = [value for value in values if key(value) == best]
    return found


def nile(t: Tables, first: int, last: int) -> float:
    return mean([float(row["volume"]) for row in t.nile if first <= int(row["year"]) <= last])


def longest_calm(t: Tables) -> int:
    runs = "".join("x" if float(row["sunactivity"]) < 10 else " " for row in t.sunspots).split()
    return max(map(len, runs))


def cells(t: Tables) -> list[tuple[float, str]]:
    return [(float(row[month]), f"{row['year']}-{month}") for row in t.elnino for month in MONTHS]


def codes(t: Tables) -> list[str]:
    return [code for row in t.zones for code in row["countries"].split()]


def name_of(t: Tables, code: str) -> str:
    (name,) = [row["name"] for row in t.countries if row["code"] == code]
    return name


RECOMPUTED: dict[str, Callable[[Tables], object]] = {
    "nile-largest-year": lambda t: only(t.nile, lambda row: int(row["volume"]))["year"],
    "nile-below-700": lambda t: sum(int(row["volume"]) < 700 for row in t.nile),
    "nile-mean-early": lambda t: nile(t, 1871, 1898),
    "nile-mean-late": lambda t: nile(t, 1899, 1970),
    "sunspots-peak-year": lambda t: only(t.sunspots, lambda row: float(row["sunactivity"]))["year"],
    "sunspots-zero-years": lambda t: sum(float(row["sunactivity"]) == 0 for row in t.sunspots),
    "sunspots-mean-20th": lambda t: mean(
        [float(row["sunactivity"]) for row in t.sunspots if row["year"].startswith("19")]
    ),
    "sunspots-above-150": lambda t: sum(float(row["sunactivity"]) > 150 for row in t.sunspots),
    "sunspots-longest-calm": longest_calm,
    "elnino-warmest-month": lambda t: only(cells(t), lambda cell: cell[0])[1],
    "elnino-mean-1997": lambda t: mean([value for value, name in cells(t) if name.startswith("1997-")]),
    "elnino-coldest": lambda t: min(cells(t))[0],
    "elnino-warmest-column": lambda t: only(list(MONTHS), lambda month: mean([float(row[month]) for row in t.elnino])),
    "elnino-above-27": lambda t: sum(value > 27 for value, _ in cells(t)),
    "macro-peak-unemployment": lambda t: max(float(row["unemp"]) for row in t.macrodata),
    "macro-peak-quarter": lambda t: "{year}Q{quarter}".format(**only(t.macrodata, lambda row: float(row["unemp"]))),
    "macro-gdp-ratio": lambda t: float(t.macrodata[-1]["realgdp"]) / float(t.macrodata[0]["realgdp"]),
    "macro-deflation": lambda t: sum(float(row["infl"]) < 0 for row in t.macrodata),
    "macro-shrinking": lambda t: sum(
        float(row["realgdp"]) < float(before["realgdp"])
        for before, row in zip(t.macrodata, t.macrodata[1:], strict=False)
    ),
    "macro-tbill-1981": lambda t: mean([float(row["tbilrate"]) for row in t.macrodata if row["year"] == "1981"]),
    "zones-northernmost": lambda t: only(t.zones, lambda row: float(row["latitude"]))["zone"],
    "zones-most-countries": lambda t: only(t.zones, lambda row: len(row["countries"].split()))["zone"],
    "zones-in-europe": lambda t: sum(row["zone"].startswith("Europe/") for row in t.zones),
    "zones-of-australia": lambda t: codes(t).count("AU"),
    "zones-southern": lambda t: sum(float(row["latitude"]) < 0 for row in t.zones),
    "country-most-zones": lambda t: name_of(t, only(sorted(set(codes(t))), codes(t).count)),
    "country-of-two-places": lambda t: name_of(
        t, next(row["countries"].split()[0] for row in t.zones if row["zone"] == "Pacific/Honolulu")
    ),
    "countries-without-zone": lambda t: len({row["code"] for row in t.countries} - set(codes(t))),
}


@pytest.mark.parametrize("line", read_lines(DATA / "expected.jsonl"), ids=lambda line: str(line["id"]))
def test_an_expected_answer_about_the_data_is_true(line: dict[str, Any]) -> None:
    answer = RECOMPUTED[line["id"]](Tables())
    if line["kind"] == "text":
        assert answer == line["answer"]
    else:
        assert float(str(answer)) == pytest.approx(float(line["answer"]), abs=line["tolerance"] + 1e-9)


def test_a_country_may_have_no_zone_but_every_zone_has_its_country() -> None:
    tables = Tables()
    assert set(codes(tables)) <= {row["code"] for row in tables.countries}


def test_the_data_is_small_enough_to_be_kept() -> None:
    assert sum(path.stat().st_size for path in (DATA / "workspace").iterdir()) < 200_000


@pytest.mark.parametrize("line", read_lines(FIX / "expected.jsonl"), ids=lambda line: str(line["id"]))
def test_of_a_project_exactly_the_named_test_fails(line: dict[str, Any]) -> None:
    project = FIX / "projects" / line["id"]
    assert (project / line["file"]).is_file()
    assert load_module(FIX / "check.py").run_tests(project) == (line["tests"], 1, 0, line["failing"])


# --- Batches and scripts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", [DATA, REPOSITORY, FIX], ids=lambda folder: folder.name)
def test_items_expected_answers_and_scripts_go_together(folder: Path, prepared: Path) -> None:
    batch = read_lines(folder / "batch.jsonl")
    expected = read_lines((prepared if folder == REPOSITORY else folder) / "expected.jsonl")
    names = [line["id"] for line in batch]
    assert len(set(names)) == len(names)
    assert names == [line["id"] for line in expected]
    assert all(f"[item {line['id']}]" in line["instruction"] for line in batch)
    fields = {name for rule in load_script(folder / "script.jsonl").rules for name in rule.when.conversations or ()}
    assert fields == set(names)


@pytest.mark.parametrize("folder", [DATA, REPOSITORY, FIX], ids=lambda folder: folder.name)
def test_a_batch_s_lines_are_taken_as_they_are(folder: Path, prepared: Path) -> None:
    file = shutil.copy(folder / "batch.jsonl", prepared) if folder == REPOSITORY else folder / "batch.jsonl"
    assert [item.custom_id for item in load_lines(Path(file)).items] == [
        line["id"] for line in read_lines(folder / "batch.jsonl")
    ]


def test_there_are_enough_questions() -> None:
    assert len(read_lines(DATA / "batch.jsonl")) >= 20
    assert len(read_lines(REPOSITORY / "batch.jsonl")) >= 20
    assert len(read_lines(FIX / "batch.jsonl")) == 5


def work(server: ModelServer, client: httpx.Client, instruction: str, workspace: Path) -> str:
    """Run the commands of our own script on this machine, in a copy of the workspace."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": instruction}]
    for _ in range(MAX_STEPS):
        body = {
            "model": "scripted",
            "messages": messages,
            "tools": [{"type": "function", "function": {"name": "bash_tool"}}],
        }
        reply = client.post(f"{server.url}/chat/completions", json=body)
        assert reply.status_code == 200, reply.text
        message = reply.json()["choices"][0]["message"]
        messages.append(message)
        if not message.get("tool_calls"):
            return str(message["content"])
        for call in message["tool_calls"]:
            command = json.loads(call["function"]["arguments"])["command"]
            done = subprocess.run(
                ["bash", "-c", command], cwd=workspace, capture_output=True, text=True, timeout=60, check=False
            )
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": done.stdout + done.stderr})
    raise AssertionError(f"no answer after {MAX_STEPS} steps")


@pytest.fixture
def client() -> Iterator[httpx.Client]:
    with httpx.Client(verify=TRUST_NOBODY, timeout=60, trust_env=False) as opened:
        yield opened


@pytest.mark.parametrize("folder", [DATA, REPOSITORY], ids=lambda folder: folder.name)
def test_the_script_answers_every_question_and_the_checker_agrees(
    folder: Path, prepared: Path, tmp_path: Path, client: httpx.Client
) -> None:
    made = prepared if folder == REPOSITORY else folder
    copy = tmp_path / "workspace"
    shutil.copytree(made / "workspace", copy)
    with running_model_server(folder / "script.jsonl") as server:
        rows = [
            build_row(line["id"], work(server, client, line["instruction"], copy))
            for line in read_lines(folder / "batch.jsonl")
        ]
        stats = server.stats()
    done = check(folder, write_rows(tmp_path / "out.jsonl", *rows), "--expected", str(made / "expected.jsonl"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == f"{len(rows)} of {len(rows)} right"
    assert (stats["replies"], stats["replies_repeated"]) == (2 * len(rows), 0)


@pytest.fixture(scope="module")
def repaired(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the artifacts and the output of a batch that the script has processed."""
    folder = tmp_path_factory.mktemp("repaired")
    rows = []
    with (
        running_model_server(FIX / "script.jsonl") as server,
        httpx.Client(verify=TRUST_NOBODY, timeout=60, trust_env=False) as client,
    ):
        for line in read_lines(FIX / "batch.jsonl"):
            copy = folder / "artifacts" / line["id"]
            shutil.copytree(FIX / line["workspace"], copy)
            rows.append(build_row(line["id"], work(server, client, line["instruction"], copy)))
    write_rows(folder / "out.jsonl", *rows)
    return folder


def test_the_script_repairs_every_project_and_the_checker_agrees(repaired: Path) -> None:
    done = check(FIX, repaired / "out.jsonl", "--artifacts", str(repaired / "artifacts"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "5 of 5 right"


def test_the_unrepaired_projects_are_wrong(repaired: Path) -> None:
    done = check(FIX, repaired / "out.jsonl", "--artifacts", str(FIX / "projects"))
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == "0 of 5 right; 5 wrong"


# --- Checkers ---------------------------------------------------------------------------------------------------------

ANSWERS = {line["id"]: line["answer"] for line in read_lines(DATA / "expected.jsonl")}


def test_wrong_missing_double_failed_and_torn_rows_are_distinguished(tmp_path: Path) -> None:
    rows = [build_row(name, f"I looked.\nANSWER: {answer}") for name, answer in ANSWERS.items()]
    rows[0] = build_row("nile-largest-year", "ANSWER: 1900")
    rows[1] = build_row("nile-below-700", "I cannot say.")
    rows[2] = {
        **rows[2],
        "response": None,
        "error": {"code": "max_iterations", "message": "stopped\x1b[31m", "kind": "model"},
    }
    del rows[3]
    output = write_rows(tmp_path / "out.jsonl", *rows, rows[-1], build_row("stranger", "ANSWER: 1"))
    with output.open("a") as file:
        file.write('{"id": "run-x", "custom_')

    done = check(DATA, output)

    assert done.returncode == 1
    assert (
        done.stdout.splitlines()[-1]
        == f"{len(ANSWERS) - 5} of {len(ANSWERS)} right; 2 wrong, 1 failed, 1 missing, 1 twice"
    )
    assert "expected '1879', came '1900'" in done.stdout
    assert "max_iterations: stopped" in done.stdout
    assert "\x1b" not in done.stdout
    assert "'stranger' belongs to no item" in done.stdout
    assert "not a row" in done.stdout


def test_what_cannot_be_judged_is_an_error_of_its_own(tmp_path: Path) -> None:
    assert check(DATA, tmp_path / "none.jsonl").returncode == 2
    unprepared = check(DATA, write_rows(tmp_path / "out.jsonl"), "--expected", str(tmp_path / "none"))
    assert unprepared.returncode == 2
    assert "README" in unprepared.stderr


checking = load_module(EXAMPLES / "batch_checking.py")


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("ANSWER: 7", "7"),
        ("first ANSWER: 6\nANSWER: 7.", "7"),
        ("**ANSWER:** `json/decoder.py`", "json/decoder.py"),
        ("> answer : <7>", "7"),
        ("The answer is 7", None),
        ("ANSWER: 6\nANSWER: 7\nbye", "7"),
    ],
)
def test_an_answer_is_found_in_the_marks_that_models_put_around_it(reply: str, answer: str | None) -> None:
    assert checking.find_answer(reply) == answer


@pytest.mark.parametrize(
    ("answer", "expected", "tolerance", "is_right"),
    [
        ("1,098.1 units", "1097.8", 0.5, True),
        ("1097.8", "1097.8", 0.0, True),
        ("1097.9", "1097.8", 0.05, False),
        ("28 of 203", "28", 0, False),
        ("about twenty", "20", 0, False),
        ("-5", "5", 0, False),
        ("13.8", "13.80", 0.005, True),
    ],
)
def test_a_number_is_right_within_its_tolerance_and_alone(
    answer: str, expected: str, tolerance: float, is_right: bool
) -> None:
    assert checking.is_number(answer, expected, tolerance) is is_right


def test_a_chat_completion_s_row_is_read_too() -> None:
    body = {"object": "chat.completion", "choices": [{"message": {"role": "assistant", "content": "ANSWER: 1"}}]}
    assert checking.find_reply({"response": {"body": body}}) == "ANSWER: 1"
    assert checking.find_reply({"response": {"body": {"choices": []}}}) is None
    assert checking.find_reply({"response": None}) is None


def relink(link: Path, target: Path) -> None:
    link.unlink()
    link.symlink_to(target)


# Artifacts that a model may leave in order to pass without a repair.
CHEATS: dict[str, Callable[[Path], object]] = {
    "an exit with code 0 before the tests": lambda place: (place / "roman.py").write_text("import os\nos._exit(0)\n"),
    "tests without the failing one": lambda place: (place / "test_roman.py").write_text("import unittest\n"),
    "a unittest of its own": lambda place: (place / "unittest.py").write_text("raise SystemExit(0)\n"),
    "a package in the module's place": lambda place: shutil.copytree(FIX / "projects" / "invoice", place / "roman"),
    "a module that cannot be imported": lambda place: (place / "roman.py").write_text("raise ImportError\n"),
    "a test that is skipped": lambda place: (place / "roman.py").write_text(
        "import unittest\nraise unittest.SkipTest('later')\n"
    ),
    "a link to another file": lambda place: relink(place / "roman.py", FIX / "projects" / "recent" / "recent.py"),
    "a flood where the report goes": lambda place: (place / "roman.py").write_text(
        "import os\nwhile True:\n    os.write(3, b'x' * 9999)\n"
    ),
    "nothing": lambda place: shutil.rmtree(place),
}


@pytest.mark.parametrize("cheat", CHEATS)
def test_a_project_that_was_not_repaired_does_not_pass_by(cheat: str, tmp_path: Path) -> None:
    place = tmp_path / "roman"
    shutil.copytree(FIX / "projects" / "roman", place)
    CHEATS[cheat](place)
    verdict = load_module(FIX / "check.py").judge_project({"id": "roman", "tests": 5}, tmp_path)
    assert (verdict.outcome, verdict.item) == ("wrong", "roman"), verdict


def test_a_repair_counts_whatever_else_was_left_beside_it(repaired: Path, tmp_path: Path) -> None:
    place = tmp_path / "roman"
    shutil.copytree(repaired / "artifacts" / "roman", place)
    (place / "test_roman.py").write_text("raise SystemExit(1)\n")
    (place / "notes.md").write_text("done")
    assert load_module(FIX / "check.py").judge_project({"id": "roman", "tests": 5}, tmp_path).outcome == "right"


def test_tests_that_never_end_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = load_module(FIX / "check.py")
    monkeypatch.setattr(module, "LIMIT_S", 1)
    (tmp_path / "test_forever.py").write_text("import time\ntime.sleep(600)\n")
    assert module.run_tests(tmp_path) == "the tests did not end within 1 s"
