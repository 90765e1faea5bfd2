"""docs/operations.md: what it sends people to is there: pictures, pages, commands, metrics, alerts."""

import re
from pathlib import Path

import pytest
from typer.main import get_command

from contract.metrics import METRICS
from orchestrator.command import app

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
MAX_PICTURE_BYTES = 100_000


def test_every_page_that_it_names_is_there() -> None:
    links = set(re.findall(r"\]\(([^)#]+)\)", PAGE))

    assert {link for link in links if not (ROOT / "docs" / link).exists()} == set()
    assert len(links) > 10


def test_its_pictures_are_those_that_the_script_makes_and_are_small() -> None:
    named = set(re.findall(r"\(pictures/([a-z-]+)\.png\)", PAGE))
    made = set(re.findall(r'Picture\("([a-z-]+)"', (ROOT / "scripts" / "pictures.py").read_text(encoding="utf-8")))

    assert named <= made
    sizes = {name: (ROOT / "docs" / "pictures" / f"{name}.png").stat().st_size for name in named}
    assert {name: size for name, size in sizes.items() if size > MAX_PICTURE_BYTES} == {}


def test_every_metric_and_alert_that_it_names_is_there() -> None:
    rules = (ROOT / "deploy" / "prometheus" / "toolcrew.rules.yml").read_text(encoding="utf-8")

    assert set(re.findall(r"`(toolcrew_[a-z_]+)", PAGE)) - METRICS.keys() == set()
    named = set(re.findall(r"`(Toolcrew[A-Za-z]+)`", PAGE))
    assert named == set(re.findall(r"alert: (\w+)", rules)) - {"ToolcrewMetricsAway", "ToolcrewInfrastructureErrors"}


@pytest.mark.parametrize("line", sorted(set(re.findall(r"`toolcrew ([a-z][^`]*)`", PAGE))))
def test_every_command_that_it_names_is_there(line: str) -> None:
    command = get_command(app)
    for word in line.split():
        inner = getattr(command, "commands", None)
        if inner is None:
            options = {name for parameter in command.params for name in parameter.opts}
            assert not word.startswith("-") or word in options, f"{line}: {word}"
        else:
            assert word in inner, f"{line}: {word}"
            command = inner[word]
