"""Create skill folders with a SKILL.md for tests."""

from collections.abc import Mapping
from pathlib import Path

SHIPPED = Path(__file__).parents[3] / "skills"


def write_skill(
    root: Path,
    folder: str,
    front: str | None = None,
    body: str = "Do it.",
    files: Mapping[str, str | bytes] | None = None,
) -> Path:
    """Write a skill's folder. `front`: the front matter; the default is a plain one. A file below scripts/ becomes
    executable.
    """
    place = root / folder
    place.mkdir(parents=True)
    matter = front if front is not None else f"name: {folder}\ndescription: Does {folder}."
    (place / "SKILL.md").write_text(f"---\n{matter}\n---\n\n{body}\n")
    for name, content in (files or {}).items():
        path = place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        if name.startswith("scripts/"):
            path.chmod(0o755)
    return place
