#!/usr/bin/env python3
"""Find the passages that are most similar to a query.

Passages and the query are vectors of words and of pieces of words, weighted by rarity. Uses only the standard library.
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
"""SATURATION: how fast repetitions of a term lose weight. LENGTH_SHARE: how much the length of a passage counts."""
CACHE_FOLDER = os.path.join(".toolcrew", "vector-search")
VERSION = 2
UNSPACED = "\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
"""Kana and Han characters. Text in these scripts has no spaces between words."""
WORD = re.compile(rf"[{UNSPACED}]+|[^\W{UNSPACED}]+", re.UNICODE)
IS_UNSPACED = re.compile(rf"[{UNSPACED}]{{2,}}")


def iter_words(text):
    """Yield the words of a text. A run of unspaced characters yields every pair of adjacent characters."""
    for word in WORD.findall(text.lower()):
        if IS_UNSPACED.fullmatch(word):
            yield from (word[at : at + 2] for at in range(len(word) - 1))
        else:
            yield word


def count_terms(text):
    """Return the number of occurrences of each word, and of each piece of a long word."""
    counts = Counter()
    for word, count in Counter(iter_words(text)).items():
        counts[word] += count
        padded = f"<{word}>"
        if len(word) > PIECE_CHARS:
            for at in range(len(padded) - PIECE_CHARS + 1):
                counts["~" + padded[at : at + PIECE_CHARS]] += count
    return counts


def split_passages(text):
    """Return (first line, last line, terms) of passages that overlap, so that one of them has the whole context."""
    lines = text.splitlines()
    passages = []
    for first in range(0, max(len(lines), 1), PASSAGE_LINES - OVERLAP_LINES):
        passage_lines = lines[first : first + PASSAGE_LINES]
        terms = count_terms("\n".join(passage_lines))
        if terms:
            passages.append((first + 1, first + len(passage_lines), terms))
        if first + PASSAGE_LINES >= len(lines):
            break
    return passages


def iter_files(paths, pattern, left_out):
    """Yield the path of each text file once."""
    yielded = set()
    for requested in paths:
        if os.path.isfile(requested):
            candidates = [requested]
        elif os.path.isdir(requested):
            candidates = iter_folder(requested)
        else:
            left_out.append({"path": requested, "why": "there is no such file or folder"})
            continue
        for path in candidates:
            name = os.path.normpath(path)
            if name not in yielded and (pattern is None or fnmatch.fnmatch(os.path.basename(name), pattern)):
                yielded.add(name)
                yield name


def iter_folder(folder):
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if not name.startswith("."):
                yield os.path.join(parent, name)


def read_passages(path, status):
    """Return the passages of a file, from the cache if the file has not changed.

    Raises ValueError when the file is not text.
    """
    stamp = [VERSION, status.st_size, status.st_mtime_ns]
    cache_path = os.path.join(
        CACHE_FOLDER, hashlib.sha256(path.encode("utf-8", "surrogateescape")).hexdigest()[:32] + ".json"
    )
    try:
        with open(cache_path, encoding="utf-8") as file:
            record = json.load(file)
        if record["stamp"] == stamp:
            return [(first, last, Counter(terms)) for first, last, terms in record["passages"]]
    except (OSError, ValueError, KeyError, TypeError):
        pass  # The cache has no valid entry. Read the file.
    with open(path, "rb") as file:
        data = file.read()
    if b"\0" in data:
        raise ValueError("it is no text")
    passages = split_passages(data.decode("utf-8", "replace"))
    store_passages(cache_path, {"stamp": stamp, "passages": passages})
    return passages


def store_passages(path, record):
    """Store passages for the next query. A failure only makes the next query slower."""
    try:
        os.makedirs(CACHE_FOLDER, exist_ok=True)
        with open(path + ".new", "w", encoding="utf-8") as file:
            json.dump(record, file)
        os.replace(path + ".new", path)
    except OSError as error:
        sys.stderr.write(f"the passages could not be cached: {error.strerror}\n")


def collect_passages(request, left_out):
    """Return (path, first line, last line, terms) of all passages."""
    remaining_bytes, passages = MAX_ALL_BYTES, []
    for path in iter_files(request.get("paths") or ["."], request.get("pattern"), left_out):
        try:
            status = os.stat(path)
            if status.st_size > MAX_FILE_BYTES:
                raise ValueError(f"it is larger than {MAX_FILE_BYTES} bytes")
            if status.st_size > remaining_bytes:
                raise ValueError("all files together are too large: name fewer with paths or pattern")
            file_passages = read_passages(path, status)
        except OSError as error:
            left_out.append({"path": path, "why": error.strerror})
        except ValueError as error:
            left_out.append({"path": path, "why": str(error)})
        else:
            remaining_bytes -= status.st_size
            passages += [(path, first, last, terms) for first, last, terms in file_passages]
    return passages


def rank_passages(query, passages):
    """Return (score, index in passages), best score first. The largest possible score is 1."""
    if not passages:
        return []
    frequencies = Counter(term for _, _, _, terms in passages for term in terms)
    sizes = [sum(count for term, count in terms.items() if term[0] != "~") for _, _, _, terms in passages]
    mean_size = sum(sizes) / len(sizes) or 1.0
    weights = weigh_query(query, frequencies, len(passages))
    best_score = sum(weights.values()) * (SATURATION + 1) or 1.0
    scores = []
    for index, (_, _, _, terms) in enumerate(passages):
        damping = SATURATION * (1 - LENGTH_SHARE + LENGTH_SHARE * sizes[index] / mean_size)
        score = sum(
            weight * terms[term] * (SATURATION + 1) / (terms[term] + damping)
            for term, weight in weights.items()
            if term in terms
        )
        if score:
            scores.append((score / best_score, index))
    return sorted(scores, key=lambda item: (-item[0], item[1]))


def weigh_query(query, frequencies, count):
    """Return the query as a vector: the weight of each term grows with its rarity.

    The pieces of a word that is in no passage replace the word. The pieces of other words find other forms of the word.
    """
    weights = {}
    for word in count_terms(query):
        if word[0] == "~":
            continue
        pieces = [term for term in count_terms(word) if term[0] == "~" and term in frequencies]
        if word in frequencies:
            weights[word] = compute_rarity(frequencies[word], count)
        share = PIECE_SHARE if word in frequencies else 1.0
        for piece in pieces:
            weights[piece] = weights.get(piece, 0.0) + share * compute_rarity(frequencies[piece], count) / len(pieces)
    return weights


def compute_rarity(frequency, count):
    return math.log(1 + (count - frequency + 0.5) / (frequency + 0.5)) ** 2


def read_lines(path, first, last):
    with open(path, encoding="utf-8", errors="replace") as file:
        lines = file.read().splitlines()[first - 1 : last]
    text = "\n".join(lines).strip()
    return text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + " [...]"


def build_answer(request):
    left_out = []
    passages = collect_passages(request, left_out)
    results, covered = [], set()
    for score, index in rank_passages(request["query"], passages):
        path, first, last, _ = passages[index]
        # Passages overlap. Only the best of adjacent passages is listed.
        if any((path, line) in covered for line in range(first + OVERLAP_LINES, last - OVERLAP_LINES + 1)):
            continue
        covered.update((path, line) for line in range(first, last + 1))
        results.append(
            {"path": path, "lines": f"{first}-{last}", "score": round(score, 3), "text": read_lines(path, first, last)}
        )
        if len(results) == request.get("limit", 5):
            break
    searched = {"files": len({path for path, _, _, _ in passages}), "passages": len(passages)}
    return {"results": results, "searched": searched, "left_out": left_out[:50], "left_out_count": len(left_out)}


def main():
    try:
        request = json.load(sys.stdin)
    except ValueError:
        sys.exit('give JSON on standard input, as {"query": "how are invoices cancelled"}')
    if not isinstance(request, dict) or not isinstance(request.get("query"), str) or not WORD.search(request["query"]):
        sys.exit('give a query with at least one word, as {"query": "how are invoices cancelled"}')
    limit, paths = request.get("limit", 5), request.get("paths", ["."])
    if not isinstance(limit, int) or not 1 <= limit <= 50:
        sys.exit("limit must be a whole number from 1 to 50")
    if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
        sys.exit('paths must be a list of files and folders, as ["docs"]')
    json.dump(build_answer(request), sys.stdout, ensure_ascii=False, indent=1)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
