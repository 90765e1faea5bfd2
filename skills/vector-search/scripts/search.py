#!/usr/bin/env python3
"""Passages most like a question: vectors of words and of pieces of words, weighed by rarity, compared by cosine.
Standard library only.
"""

import fnmatch
import hashlib
import json
import math
import os
import re
import sys
from collections import Counter

PASSAGE_LINES, OVERLAP_LINES = 12, 3
MAX_FILE_BYTES, MAX_ALL_BYTES = 2 * 1024 * 1024, 24 * 1024 * 1024
MAX_SHOWN_CHARS = 600
PIECE_CHARS, PIECE_SHARE = 4, 0.35
SATURATION, LENGTH_SHARE = 1.2, 0.5
"""How soon more of one term counts for nothing more, and how far a long passage is held to be long."""
KEPT = os.path.join(".toolcrew", "vector-search")
VERSION = 2
UNSPACED = "\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
"""Kana and Han characters: text in them has no spaces between its words."""
WORD = re.compile(rf"[{UNSPACED}]+|[^\W{UNSPACED}]+", re.UNICODE)
IS_UNSPACED = re.compile(rf"[{UNSPACED}]{{2,}}")


def words_of(text):
    """The words of a text; a run of unspaced characters gives each pair of neighbours."""
    for word in WORD.findall(text.lower()):
        if IS_UNSPACED.fullmatch(word):
            yield from (word[at : at + 2] for at in range(len(word) - 1))
        else:
            yield word


def terms_of(text):
    """How often each word, and each piece of the longer ones, is in it."""
    counts = Counter()
    for word, count in Counter(words_of(text)).items():
        counts[word] += count
        padded = f"<{word}>"
        if len(word) > PIECE_CHARS:
            for at in range(len(padded) - PIECE_CHARS + 1):
                counts["~" + padded[at : at + PIECE_CHARS]] += count
    return counts


def passages_of(text):
    """(first line, last line, terms) of pieces that overlap, so that what matters is whole in one of them."""
    lines = text.splitlines()
    found = []
    for first in range(0, max(len(lines), 1), PASSAGE_LINES - OVERLAP_LINES):
        some = lines[first : first + PASSAGE_LINES]
        terms = terms_of("\n".join(some))
        if terms:
            found.append((first + 1, first + len(some), terms))
        if first + PASSAGE_LINES >= len(lines):
            break
    return found


def files_below(paths, pattern, left_out):
    """Paths of the text files, each once."""
    seen = set()
    for asked in paths:
        if os.path.isfile(asked):
            candidates = [asked]
        elif os.path.isdir(asked):
            candidates = walk(asked)
        else:
            left_out.append({"path": asked, "why": "there is no such file or folder"})
            continue
        for path in candidates:
            name = os.path.normpath(path)
            if name not in seen and (pattern is None or fnmatch.fnmatch(os.path.basename(name), pattern)):
                seen.add(name)
                yield name


def walk(folder):
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if not name.startswith("."):
                yield os.path.join(parent, name)


def read_passages(path, facts):
    """Its passages, as kept of an earlier question where the file is the same. Raises ValueError for what is no
    text.
    """
    stamp = [VERSION, facts.st_size, facts.st_mtime_ns]
    kept = os.path.join(KEPT, hashlib.sha256(path.encode("utf-8", "surrogateescape")).hexdigest()[:32] + ".json")
    try:
        with open(kept, encoding="utf-8") as file:
            told = json.load(file)
        if told["stamp"] == stamp:
            return [(first, last, Counter(terms)) for first, last, terms in told["passages"]]
    except (OSError, ValueError, KeyError, TypeError):
        told = None  # not kept, or damaged: it is read anew
    with open(path, "rb") as file:
        data = file.read()
    if b"\0" in data:
        raise ValueError("it is no text")
    passages = passages_of(data.decode("utf-8", "replace"))
    keep(kept, {"stamp": stamp, "passages": passages})
    return passages


def keep(path, told):
    """For the next question; one who cannot keep it reads it again."""
    try:
        os.makedirs(KEPT, exist_ok=True)
        with open(path + ".new", "w", encoding="utf-8") as file:
            json.dump(told, file)
        os.replace(path + ".new", path)
    except OSError as error:
        sys.stderr.write(f"what was read is not kept: {error.strerror}\n")


def gather(asked, left_out):
    """(path, first line, last line, terms) of all passages."""
    room, found = MAX_ALL_BYTES, []
    for path in files_below(asked.get("paths") or ["."], asked.get("pattern"), left_out):
        try:
            facts = os.stat(path)
            if facts.st_size > MAX_FILE_BYTES:
                raise ValueError(f"it is larger than {MAX_FILE_BYTES} bytes")
            if facts.st_size > room:
                raise ValueError("all files together are too large: name fewer with paths or pattern")
            passages = read_passages(path, facts)
        except OSError as error:
            left_out.append({"path": path, "why": error.strerror})
        except ValueError as error:
            left_out.append({"path": path, "why": str(error)})
        else:
            room -= facts.st_size
            found += [(path, first, last, terms) for first, last, terms in passages]
    return found


def rank(query, passages):
    """(score, place in passages), the most similar first. A passage that had every word of the query again and again
    would have 1.
    """
    if not passages:
        return []
    among = Counter(term for _, _, _, terms in passages for term in terms)
    sizes = [sum(count for term, count in terms.items() if term[0] != "~") for _, _, _, terms in passages]
    usual = sum(sizes) / len(sizes) or 1.0
    wanted = weigh(query, among, len(passages))
    most = sum(wanted.values()) * (SATURATION + 1) or 1.0
    scores = []
    for place, (_, _, _, terms) in enumerate(passages):
        damping = SATURATION * (1 - LENGTH_SHARE + LENGTH_SHARE * sizes[place] / usual)
        score = sum(
            weight * terms[term] * (SATURATION + 1) / (terms[term] + damping)
            for term, weight in wanted.items()
            if term in terms
        )
        if score:
            scores.append((score / most, place))
    return sorted(scores, key=lambda one: (-one[0], one[1]))


def weigh(query, among, count):
    """The query as a vector: each term by how rare it is. The pieces of a word that is nowhere stand for it as a whole,
    those of others for its other forms.
    """
    wanted = {}
    for word in terms_of(query):
        if word[0] == "~":
            continue
        pieces = [term for term in terms_of(word) if term[0] == "~" and term in among]
        if word in among:
            wanted[word] = rarity(among[word], count)
        share = PIECE_SHARE if word in among else 1.0
        for piece in pieces:
            wanted[piece] = wanted.get(piece, 0.0) + share * rarity(among[piece], count) / len(pieces)
    return wanted


def rarity(among, count):
    return math.log(1 + (count - among + 0.5) / (among + 0.5)) ** 2


def show(path, first, last):
    with open(path, encoding="utf-8", errors="replace") as file:
        lines = file.read().splitlines()[first - 1 : last]
    text = "\n".join(lines).strip()
    return text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + " [...]"


def answer(asked):
    left_out = []
    passages = gather(asked, left_out)
    results, taken = [], set()
    for score, place in rank(asked["query"], passages):
        path, first, last, _ = passages[place]
        # Passages overlap: of neighbours the better one is enough.
        if any((path, line) in taken for line in range(first + OVERLAP_LINES, last - OVERLAP_LINES + 1)):
            continue
        taken.update((path, line) for line in range(first, last + 1))
        results.append(
            {"path": path, "lines": f"{first}-{last}", "score": round(score, 3), "text": show(path, first, last)}
        )
        if len(results) == asked.get("limit", 5):
            break
    searched = {"files": len({path for path, _, _, _ in passages}), "passages": len(passages)}
    return {"results": results, "searched": searched, "left_out": left_out[:50], "left_out_count": len(left_out)}


def main():
    try:
        asked = json.load(sys.stdin)
    except ValueError:
        sys.exit('give JSON on standard input, as {"query": "how are invoices cancelled"}')
    if not isinstance(asked, dict) or not isinstance(asked.get("query"), str) or not WORD.search(asked["query"]):
        sys.exit('give a query with at least one word, as {"query": "how are invoices cancelled"}')
    limit, paths = asked.get("limit", 5), asked.get("paths", ["."])
    if not isinstance(limit, int) or not 1 <= limit <= 50:
        sys.exit("limit must be a whole number from 1 to 50")
    if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
        sys.exit('paths must be a list of files and folders, as ["docs"]')
    json.dump(answer(asked), sys.stdout, ensure_ascii=False, indent=1)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
