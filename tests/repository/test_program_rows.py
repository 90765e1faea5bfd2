"""The rows of scripts/programs.toml: what does not work has a reason and an error by which it is recognized."""

from pathlib import Path

import pytest

from scripts.pages import programs as page
from scripts.programs import DATA, Program, load_programs

PROGRAMS = load_programs()


def test_names_are_unique() -> None:
    names = [program.name for program in PROGRAMS]
    assert [name for name in names if names.count(name) > 1] == []


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_a_row_that_does_not_work_has_an_error_and_no_other_row_has_one(program: Program) -> None:
    assert bool(program.fails) == bool(program.error)


def test_an_unknown_key_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "programs.toml"
    data.write_text(f"{DATA.read_text()}\n[[program]]\nname = 'x'\nscript = 'true'\nuser_fail = 'a'\n")
    monkeypatch.setattr("scripts.programs.DATA", data)
    with pytest.raises(ValueError, match="user_fail"):
        load_programs()


def test_the_page_has_each_program_in_one_of_its_two_lists() -> None:
    failing, _, working = page.build_page().partition("## Which programs work?")
    for program in PROGRAMS:
        assert (f"\n| {program.name} |" in failing) == bool(program.fails)
        assert (f"\n- {program.name}\n" in working) != bool(program.fails)
