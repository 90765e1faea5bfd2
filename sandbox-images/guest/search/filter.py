"""Select the files of a content search by name, with include, exclude and type."""

from __future__ import annotations

import os
import re

from guest.failures import INVALID_PATTERN, PATH_NOT_ALLOWED, Failure
from guest.search.glob_patterns import MAX_PATTERN_CHARS, BadGlob, Glob, compile_any, expand_braces, split_list
from guest.search.types import find_globs

_PLAIN = re.compile(r"[A-Za-z0-9_.*?-]+")


class NameFilter:
    """Conditions for the path of a file below the start folder. Without any condition, every file is accepted."""

    def __init__(self, include: str | None, exclude: str | None, type_name: str | None) -> None:
        """Compile the globs. Raises Failure for an invalid glob or an unknown type."""
        included, excluded = _read_globs(include, "include"), _read_globs(exclude, "exclude")
        excluded += [glob[1:] for glob in included if glob.startswith("!")]
        included = [glob for glob in included if not glob.startswith("!")]
        typed = find_globs(type_name) if type_name is not None else []
        self.is_empty = not (included or excluded or typed)
        self._included = _Names(included, "include")
        self._excluded = _Names(excluded, "exclude")
        self._typed = _Names(typed, "type")
        self._left_out: dict[str, bool] = {}

    def takes(self, prefix: str, name: str) -> bool:
        """Return whether to search the file `name` in the folder `prefix`. The folder itself must not be excluded."""
        if self._typed.has_any and not self._typed.match(prefix, name):
            return False
        if self._included.has_any and not self._included.match(prefix, name):
            return False
        return not self.excludes(prefix, name)

    def takes_path(self, path: bytes) -> bool:
        """Return whether to search a file, by its path and by each folder that it is in."""
        if self.is_empty:
            return True
        prefix, slash, name = os.fsdecode(path).rpartition("/")
        return self.takes(prefix + slash, name) and not self._is_left_out(prefix)

    def _is_left_out(self, folder: str) -> bool:
        """Return whether a folder or one above it is excluded."""
        if not folder or not self._excluded.has_any:
            return False
        known = self._left_out.get(folder)
        if known is None:
            above, slash, name = folder.rpartition("/")
            known = self._left_out[folder] = self._is_left_out(above) or self.excludes(above + slash, name)
        return known

    def excludes(self, prefix: str, name: str) -> bool:
        """Return whether the file or folder itself is excluded. An excluded folder excludes everything below it."""
        return self._excluded.has_any and bool(self._excluded.match(prefix, name))

    def names_at_most(self) -> list[str]:
        """Return name globs of which every accepted file matches at least one, for an engine that filters first.

        An empty list means that no such globs are known.
        """
        return next((names.last_parts() for names in (self._included, self._typed) if names.last_parts()), [])

    def names_left_out(self) -> list[str]:
        """Return name globs for which every matching file and folder is excluded."""
        return [
            glob.parts[0] for glob in self._excluded.globs if len(glob.parts) == 1 and _PLAIN.fullmatch(glob.parts[0])
        ]


class _Names:
    """Alternative globs. A glob with one part applies to names at any depth."""

    def __init__(self, texts: list[str], what: str) -> None:
        self.globs: list[Glob] = []
        for text in texts:
            try:
                self.globs += [_build_glob(part) for part in expand_braces(text)]
            except BadGlob as error:
                raise error.as_failure(what, text) from None
        self.has_any = bool(self.globs)
        self._by_name = compile_any([glob.regex for glob in self.globs if glob.name_only], what)
        self._by_path = compile_any([glob.regex for glob in self.globs if not glob.name_only], what)

    def match(self, prefix: str, name: str) -> object:
        return (self._by_name and self._by_name(name)) or (self._by_path and self._by_path(prefix + name))

    def last_parts(self) -> list[str]:
        last = [glob.parts[-1] for glob in self.globs]
        return last if all(_PLAIN.fullmatch(part) and part != "**" for part in last) else []


def _build_glob(text: str) -> Glob:
    """Compile a glob.

    A slash at the front anchors the glob at the start of the search. A slash at the end selects everything in the
    folder.
    """
    if text.endswith("/"):
        text = f"{text}**" if "/" in text.rstrip("/") else f"**/{text}**"
    glob = Glob(text, any_depth=not text.startswith("/"))
    if not glob.parts:
        raise BadGlob("no name in it", 1)
    return glob


def _read_globs(text: str | None, what: str) -> list[str]:
    if text is None:
        return []
    if len(text) > MAX_PATTERN_CHARS:
        raise Failure(INVALID_PATTERN, f"{what} has {len(text)} characters, more than {MAX_PATTERN_CHARS}")
    globs = split_list(text)
    if any(".." in glob.split("/") for glob in globs):
        raise Failure(PATH_NOT_ALLOWED, f"{what} cannot go up with '..': give the directory to search as path")
    return globs
