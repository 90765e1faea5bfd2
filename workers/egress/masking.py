"""Masks secrets in the answers of hosts.

Invariant: a program sees whether an answer contains a whole secret, and nothing else about the secret's value. So
neither the sizes nor the times of the pieces that it receives may depend on whether bytes are a part of a secret:

- What is held back depends only on the bytes that arrived and on the length of the longest form of a secret.
- The search executes the same operations for any text. It searches all positions of a text at once, with integers that
  have one bit for each position. A search for the next occurrence (`bytes.find`) or an automaton with few steps would
  be faster for a text that has no character of the secret.
"""

import asyncio
import hashlib
import json
import re
from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace
from typing import Final
from weakref import WeakValueDictionary

from toolcrew.contract.masking import SecretForm, find_forms

PIECE_BYTES = 64 * 1024
_CHARS: Final = range(0x20, 0x7F)
"""Bytes that forms consist of. Any other byte of a text ends the search for a form that began before it."""
_BITS = 7
_OPERATIONS_PER_STEP = 1_000
"""Operations with integers between two pauses: about 2 ms for PIECE_BYTES."""
_TAIL_CHARS = 64
"""Characters at the end of a form that are always compared. The rest is compared only in a text that has them. A
program could notice that, but it learns nothing unless it knows nearly all of these characters.
"""
_FOLDED = bytes(ord(chr(byte).lower()) if byte in _CHARS else 0 for byte in range(256))
_PLANES = [bytes(ord("01"[_FOLDED[byte] >> bit & 1]) for byte in range(256)) for bit in range(_BITS)]
_IS_CHAR = bytes(byte in _CHARS for byte in range(256))
_RUN = re.compile(b"1+")


@dataclass(frozen=True)
class MaskedText:
    """A text without secrets. `found`: names of the secrets that it contained."""

    text: bytes
    found: frozenset[str] = frozenset()


class SecretMasker:
    """Replaces forms of secrets by `*`, in upper or lower case. The length of the text stays the same. `forms`: the
    names of the secrets that have the form.

    Raises ValueError for a form with other characters than printable ASCII.
    """

    def __init__(self, forms: Mapping[SecretForm, frozenset[str]], turn: asyncio.Lock | None = None) -> None:
        """`turn`: shared by all maskers of a tenant, of which one searches at a time. A search takes megabytes."""
        self._turn = turn or asyncio.Lock()
        self._forms: dict[SecretForm, frozenset[str]] = {}
        for form, names in forms.items():
            if not form.text.isascii() or not form.text.isprintable():
                raise ValueError("a form of a secret has other characters than printable ASCII")
            folded = replace(form, text=form.text.lower())
            self._forms[folded] = self._forms.get(folded, frozenset()) | names
        lengths = [len(form.text) for form in self._forms]
        self._shortest = min(lengths, default=0)
        self._longest = max(lengths, default=0)

    @classmethod
    async def of(cls, values: Mapping[str, str], turn: asyncio.Lock | None = None) -> "SecretMasker":
        """Return a masker for all forms of the secrets. `values`: name -> value. Other tasks run between secrets."""
        forms: dict[SecretForm, frozenset[str]] = {}
        for name, value in values.items():
            for form in find_forms(value):
                forms[form] = forms.get(form, frozenset()) | {name}
            await asyncio.sleep(0)
        return cls(forms, turn)

    @property
    def held_bytes(self) -> int:
        """Return how many bytes at the end of a text may belong to a form that continues: a power of two."""
        return 1 << (self._longest + 1).bit_length()

    async def mask(self, data: bytes) -> MaskedText:
        """Return the masked text. Other tasks run between the steps of a long search."""
        async with self._turn:
            steps = self._mask(data)
            while True:
                try:
                    next(steps)
                except StopIteration as end:
                    masked: MaskedText = end.value
                    return masked
                await asyncio.sleep(0)

    def _mask(self, data: bytes) -> Generator[None, None, MaskedText]:
        if not self._forms or len(data) < self._shortest:
            return MaskedText(data)
        text = _Positions(data, self._longest)
        covered, found = 0, frozenset[str]()
        for form, names in self._forms.items():
            if positions := (yield from text.find(form)):
                covered |= positions
                found |= names
        return MaskedText(_write_stars(data, covered), found)


class SharedMaskers:
    """The maskers of all connections: one for each tenant and set of secrets, as long as a connection uses it. All
    methods run in one event loop.
    """

    def __init__(self) -> None:
        self._maskers = WeakValueDictionary[tuple[str, bytes], SecretMasker]()
        self._turns = WeakValueDictionary[str, asyncio.Lock]()
        self._building = WeakValueDictionary[tuple[str, bytes], asyncio.Lock]()

    def __len__(self) -> int:
        return len(self._maskers)

    async def get(self, tenant: str, values: Mapping[str, str]) -> SecretMasker:
        """Return the masker of a tenant's secrets. `values`: name -> value."""
        key = tenant, hashlib.sha256(json.dumps(sorted(values.items())).encode()).digest()
        # Connections that open at the same time wait for one masker, and do not each build one.
        async with self._building.setdefault(key, asyncio.Lock()):
            if (masker := self._maskers.get(key)) is None:
                masker = await SecretMasker.of(values, self._turns.setdefault(tenant, asyncio.Lock()))
                self._maskers[key] = masker
            return masker


class _Positions:
    """The positions of a text as integers: the first byte of the text is the highest of `size` bits.

    All integers also have `padding` bits above these, which are set. So no integer gets shorter, and faster to work
    with, if the text lacks a character.
    """

    def __init__(self, data: bytes, padding: int) -> None:
        self._all = (1 << len(data)) - 1
        ones = b"1" * (padding + 1)
        self._set = [int(ones + data.translate(plane), 2) for plane in _PLANES]
        self._unset = [plane ^ self._all for plane in self._set]
        self._of_char: dict[str, int] = {}
        self._operations = 0

    def find(self, form: SecretForm) -> Generator[None, None, int]:
        """Return the positions that the form covers, with its neighbors."""
        starts = self._find_char(form.text[-1])
        for compared, char in enumerate(reversed(form.text[:-1]), 1):
            if compared == _TAIL_CHARS and not starts & self._all:
                return 0
            starts = starts << 1 & self._find_char(char)
            self._operations += 1
            if self._operations % _OPERATIONS_PER_STEP == 0:
                yield
        return self._cover(starts & self._all, form)

    def _find_char(self, char: str) -> int:
        if (found := self._of_char.get(char)) is None:
            found = -1
            for bit in range(_BITS):
                found &= (self._set if ord(char) >> bit & 1 else self._unset)[bit]
            self._of_char[char] = found
        return found

    def _cover(self, starts: int, form: SecretForm) -> int:
        """Return the positions from each start to its end."""
        covered, width, length = starts, 1, len(form.text) + form.after
        while covered and width < length:
            step = min(width, length - width)
            covered |= covered >> step
            width += step
        return covered | starts << form.before & self._all


def _write_stars(data: bytes, covered: int) -> bytes:
    if not covered:
        return data
    masked = bytearray(data)
    for run in _RUN.finditer(format(covered, f"0{len(data)}b").encode()):
        masked[run.start() : run.end()] = b"*" * (run.end() - run.start())
    return bytes(masked)


class MaskedStream:
    """Masks a body that arrives in pieces. `is_in_blocks`: bytes come out in blocks of one size, whatever the pieces;
    otherwise everything up to the last byte that no form can contain, such as the end of a line, comes out at once.
    """

    def __init__(self, masker: SecretMasker, *, is_in_blocks: bool = False) -> None:
        self._masker = masker
        self._held_bytes = masker.held_bytes
        self._block_bytes = PIECE_BYTES if is_in_blocks else 1
        self._raw = b""
        self._sent = 0
        """The bytes that may still matter, and how many of them have come out already."""

    async def take(self, data: bytes) -> MaskedText:
        """Return the bytes that can be sent now."""
        self._raw += data
        if len(self._raw) - self._sent < self._block_bytes:
            return MaskedText(b"")
        last_end = self._raw.translate(_IS_CHAR).rfind(0) + 1
        free = last_end
        # Wait for as many bytes as are held, so that bytes that arrive one by one are not searched again each time.
        if len(self._raw) - self._sent >= 2 * self._held_bytes:
            free = max(free, len(self._raw) - self._held_bytes)
        free -= max(0, free - self._sent) % self._block_bytes
        if free <= self._sent:
            return MaskedText(b"")
        piece = await self._mask(free)
        # A form may begin in bytes that have come out: those are masked, but its end comes out later.
        first = max(free - self._held_bytes, last_end if last_end <= free else 0, 0)
        self._raw, self._sent = self._raw[first:], free - first
        return piece

    async def finish(self) -> MaskedText:
        """Return the held bytes at the end of the body."""
        return await self._mask(len(self._raw))

    async def _mask(self, end: int) -> MaskedText:
        masked = await self._masker.mask(self._raw)
        return replace(masked, text=masked.text[self._sent : end])
