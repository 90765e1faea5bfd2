#!/usr/bin/env python3
"""Counts words: `{"files": [...], "top": n}` on standard input, one JSON object on standard output."""

import collections
import json
import re
import sys


def count(path, top):
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            text = file.read()
    except OSError as error:
        return {"error": error.strerror}
    words = re.findall(r"[^\W_]+", text.lower())
    frequent = sorted(collections.Counter(words).items(), key=lambda one: (-one[1], one[0]))
    return {"lines": len(text.splitlines()), "words": len(words), "characters": len(text), "top": frequent[:top]}


def main():
    try:
        asked = json.load(sys.stdin)
        files, top = asked["files"], asked.get("top", 10)
    except (ValueError, TypeError, KeyError):
        sys.exit('give {"files": [names of files]} on standard input')
    if not isinstance(files, list) or not files or not isinstance(top, int):
        sys.exit('give {"files": [names of files], "top": a number}')
    told = {str(path): count(str(path), top) for path in files}
    sys.stdout.write(json.dumps(told, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
