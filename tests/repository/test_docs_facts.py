"""Facts in the handwritten pages: named commands, options, settings, metrics, alerts, files and pictures exist, and
the pages stay within their size.
"""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from toolcrew.contract.metrics import METRICS
from toolcrew.contract.settings import OTHERS, SETTINGS
from toolcrew.orchestrator.command import import_all

ROOT = Path(__file__).parents[2]
NAV = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
GENERATED = {page for part in NAV if "Reference" in part for entry in part["Reference"] for page in entry.values()}
OUTSIDE = [ROOT / "README.md", ROOT / "SECURITY.md", ROOT / "CHANGELOG.md", ROOT / "examples" / "README.md"]
PAGES = [*OUTSIDE, *sorted(page for page in (ROOT / "docs").glob("*.md") if page.name not in GENERATED)]
TEXTS = {page: page.read_text(encoding="utf-8") for page in PAGES}
ALL = "\n".join(TEXTS.values())
MAX_PICTURE_BYTES = 100_000
SKILL_FILE = "scripts/count.py"
# Alerts of the deployment's own monitoring, without a runbook.
NO_RUNBOOK = {"ToolcrewMetricsAway", "ToolcrewInfrastructureErrors"}


COMMANDS: Any = import_all()


def read_command_lines() -> set[str]:
    """Return every command line of `toolcrew` on the pages, in inline code and in blocks."""
    inline = re.findall(r"`(toolcrew [a-z][^`\n]*)`", ALL)
    fences = re.findall(r"^```([a-z]*)\n(.*?)^```$", ALL, re.DOTALL | re.MULTILINE)
    lines = [line for kind, block in fences if kind in ("", "sh", "console") for line in block.splitlines()]
    unquoted = [re.sub(r"'[^']*'|\"[^\"]*\"", "QUOTED", line) for line in lines]
    commands = [re.split(r"\s{2,}|\s#\s|\s[|&]|[<>)]", line)[0] for line in unquoted]
    matches = [match for line in commands for match in re.findall(r"(?:^|(?<!-n)[\s$(])(toolcrew [a-z].*)", line)]
    return {line.strip() for line in [*inline, *matches]}


@pytest.mark.parametrize("line", sorted(read_command_lines()))
def test_every_documented_command_and_option_exists(line: str) -> None:
    command = COMMANDS
    for word in shlex.split(line)[1:]:
        inner = getattr(command, "commands", None)
        if inner is not None:
            if word.startswith("-"):
                return
            options = [choice for choice in re.split(r"[|,]", word) if choice]
            assert all(choice in inner for choice in options), f"{line}: {word}"
            command = inner[options[0]]
        elif word == "--":
            return
        elif re.fullmatch(r"--?[a-z][a-z-]*(=.*)?", word):
            options = [name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)]
            assert word.partition("=")[0] in options, f"{line}: {word}"


def test_every_documented_setting_exists() -> None:
    names = {
        (page.name, name)
        for page, text in TEXTS.items()
        if page.name != "CHANGELOG.md"
        for name in re.findall(r"TOOLCREW_[A-Z][A-Z_]*[A-Z]", text)
    }
    assert {one for one in names if one[1].removeprefix("TOOLCREW_") not in SETTINGS | OTHERS} == set()


def test_every_documented_metric_and_alert_exists() -> None:
    rules = (ROOT / "deploy" / "prometheus" / "toolcrew.rules.yml").read_text(encoding="utf-8")

    assert set(re.findall(r"`(toolcrew_[a-z_]+)", ALL)) - METRICS.keys() == set()
    names = set(re.findall(r"`(Toolcrew[A-Z][A-Za-z]+)`", TEXTS[ROOT / "docs" / "operations.md"]))
    assert names == set(re.findall(r"alert: (\w+)", rules)) - NO_RUNBOOK


def test_every_documented_file_exists() -> None:
    pattern = r"`((?:archives|concurrency|contract|store|orchestrator|workers|telemetry|tests|scripts|deploy|examples|sandbox-images)/[^`\s*]+)`"
    assert {name for name in re.findall(pattern, ALL) if not (ROOT / name.partition("::")[0]).exists()} <= {SKILL_FILE}


def test_every_picture_is_generated_by_a_script_and_small() -> None:
    names = set(re.findall(r"\(pictures/([a-z-]+)\.png\)", ALL))
    scripts = "".join((ROOT / "scripts" / name).read_text() for name in ("pictures.py", "page_pictures.py"))

    assert {name for name in names if f'"{name}"' not in scripts} == set()
    sizes = {name: (ROOT / "docs" / "pictures" / f"{name}.png").stat().st_size for name in names}
    assert {name: size for name, size in sizes.items() if size > MAX_PICTURE_BYTES} == {}


def test_the_pages_stay_within_their_word_limits() -> None:
    """At most 22 pages and 43,000 words by hand; the README at most 1,200 words."""
    written = re.compile(r"<!-- hosts: begin.*?<!-- hosts: end -->", re.DOTALL)
    counts = {page: len(written.sub("", text).split()) for page, text in TEXTS.items()}
    by_hand = [page for page in PAGES if page.parent == ROOT / "docs" or page.name in ("README.md", "SECURITY.md")]
    assert len([page for page in by_hand if page.parent.name != "examples"]) <= 22
    assert sum(counts.values()) <= 43_000
    assert counts[ROOT / "README.md"] <= 1_200
