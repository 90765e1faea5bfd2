#!/usr/bin/env python3
"""Count words: reads `{"files": [...], "top": n}` from standard input, writes one JSON object to standard output."""

import collections
import json
import re
import sys


def count_words(path, top):
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            text = file.read()
    except OSError as error:
        return {"error": error.strerror}
    words = re.findall(r"[^\W_]+", text.lower())
    frequent = sorted(collections.Counter(words).items(), key=lambda item: (-item[1], item[0]))
    return {"lines": len(text.splitlines()), "words": len(words), "characters": len(text), "top": frequent[:top]}


def main():
    try:
        request = json.load(sys.stdin)
        files, top = request["files"], request.get("top", 10)
    except (ValueError, TypeError, KeyError):
        sys.exit('give {"files": [names of files]} on standard input')
    if not isinstance(files, list) or not files or not isinstance(top, int):
        sys.exit('give {"files": [names of files], "top": a number}')
    counts = {str(path): count_words(str(path), top) for path in files}
    sys.stdout.write(json.dumps(counts, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
