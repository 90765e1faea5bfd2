"""The configuration of git in sandboxes."""

import os
import subprocess
from pathlib import Path

CONFIGURATION = Path(__file__).resolve().parents[2] / "sandbox-images" / "base" / "gitconfig"
COMMIT = "git init -q code && cd code && git commit -q --allow-empty -m one && git log --format='%an <%ae> %cn'"


def commit(home: Path) -> str:
    # Without the configuration of this machine, which the file includes.
    system = home / "system"
    system.write_text(CONFIGURATION.read_text().partition("[include]")[0])
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "GIT_CONFIG_SYSTEM": str(system)}
    done = subprocess.run(["bash", "-c", COMMIT], cwd=home, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_a_program_commits_without_a_configured_author(tmp_path: Path) -> None:
    assert commit(tmp_path) == "sandbox <sandbox@localhost> sandbox"


def test_an_author_that_the_session_configures_wins(tmp_path: Path) -> None:
    (tmp_path / ".gitconfig").write_text("[user]\nname = Ada\nemail = ada@example.com\n")
    assert commit(tmp_path) == "Ada <ada@example.com> Ada"
