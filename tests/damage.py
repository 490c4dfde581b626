"""Damages files as disks, kills and strangers do: seeded, so that a failure can be repeated.

`variants(content, seed, count)` gives `(kind, bytes)`; every kind of damage comes round in turn.
"""

from __future__ import annotations

import io
import itertools
import json
import random
import struct
import zipfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

DTYPES = ("<f8", "|O", "<i4", "|S5", ">f4", "<c8", "|V16", "<M8[s]", "<U3", "nonsense", "<f2")
VALUES = (
    None, True, -1, 0, 3, 2**70, 1.5, 1e300, float("nan"), float("inf"), "", "x", "\ud800", [], [[]], {},
    {"a": 1}, [None],
)  # fmt: skip
NESTED = "[" * 5000
Damage = Callable[[bytes, random.Random], bytes]


def variants(
    content: bytes, seed: int, count: int, kinds: Sequence[Damage] = ()
) -> Iterator[tuple[str, bytes]]:
    """`count` damaged forms of an `.npz` file; with `TEXT_KINDS` of a JSON text, or lines of it."""
    rng = random.Random(seed)
    for _, kind in zip(range(count), itertools.cycle(kinds or KINDS), strict=False):
        yield kind.__name__, kind(content, rng)


def flipped_bits(content: bytes, rng: random.Random) -> bytes:
    damaged = bytearray(content)
    for _ in range(rng.randint(1, 8)):
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
    return bytes(damaged)


def overwritten(content: bytes, rng: random.Random) -> bytes:
    start, size = rng.randrange(len(content)), rng.randint(1, 600)
    filling = rng.choice((b"\0" * size, rng.randbytes(size)))
    return content[:start] + filling + content[start + size :]


def cut(content: bytes, rng: random.Random) -> bytes:
    return content[: rng.randrange(len(content))]


def missing_middle(content: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(content))
    return content[:start] + content[start + rng.randint(1, 600) :]


def damaged_directory(content: bytes, rng: random.Random) -> bytes:
    """Bits in the zip's own records alone: flags, methods, sizes, offsets."""
    damaged = bytearray(content)
    records = [at for sign in (b"PK\1\2", b"PK\3\4", b"PK\5\6") for at in _places(content, sign)]
    at = rng.choice(records)
    damaged[min(at + rng.randint(4, 40), len(damaged) - 1)] ^= 1 << rng.randrange(8)
    return bytes(damaged)


def encrypted(content: bytes, rng: random.Random) -> bytes:
    """The flag of encryption on a member, in both of its records."""
    damaged = bytearray(content)
    for sign, offset in ((b"PK\1\2", 8), (b"PK\3\4", 6)):
        damaged[rng.choice(_places(content, sign)) + offset] |= 1
    return bytes(damaged)


def exchanged_members(content: bytes, rng: random.Random) -> bytes:
    members = _members(content)
    first, second = rng.sample(sorted(members), 2)
    members[first], members[second] = members[second], members[first]
    return _packed(members, rng)


def renamed_member(content: bytes, rng: random.Random) -> bytes:
    members = _members(content)
    name = rng.choice(sorted(members))
    new = rng.choice(("", "x", "../x.npy", "a/b.npy", name.removesuffix(".npy"), name + ".npy"))
    members[new] = members.pop(name)
    return _packed(members, rng)


def dropped_member(content: bytes, rng: random.Random) -> bytes:
    members = _members(content)
    del members[rng.choice(sorted(members))]
    return _packed(members, rng)


def other_array_header(content: bytes, rng: random.Random) -> bytes:
    """Another shape, dtype or order, spelt as numpy spells it."""
    members = _members(content)
    name = rng.choice(sorted(members))
    length = struct.unpack("<H", members[name][8:10])[0]
    text, data = members[name][10 : 10 + length].decode("latin1"), members[name][10 + length :]
    shape = rng.choice(
        ("()", "(0,)", "(-1,)", "(2**40,)", "(1 << 62, 2)", "(3,)", "(1.5,)", "None")
    )
    for old, new in (
        (text[text.index("(") : text.index(")") + 1], shape),
        (text[text.index("descr': ") + 8 :].split(",")[0], repr(rng.choice(DTYPES))),
        ("False", rng.choice(("True", "None"))),
        ("{", rng.choice(("", "{" * 200, "{'extra': 1, "))),
    ):
        if rng.random() < 0.5:
            text = text.replace(old, new, 1)
    header = text.encode("latin1")
    members[name] = b"\x93NUMPY\1\0" + struct.pack("<H", len(header)) + header + data
    return _packed(members, rng)


def other_json(content: bytes, rng: random.Random) -> bytes:
    """A changed field of a member that holds JSON; files without one lose a member."""
    members = _members(content)
    for name in ("header.npy", "settings.npy"):
        if name in members:
            raw = members[name][128:]
            text = raw if name.startswith("header") else raw.decode("utf-32-le").encode()
            changed = other_field(text, rng)
            if name.startswith("settings"):
                changed = changed.decode(errors="replace").encode("utf-32-le", "replace")
            members[name] = _array(changed, name.startswith("settings"))
            return _packed(members, rng)
    return dropped_member(content, rng)


def other_field(content: bytes, rng: random.Random) -> bytes:
    """One value anywhere in the JSON of a line replaced, removed or nested."""
    lines = content.decode().splitlines()
    number = rng.randrange(len(lines))
    value = json.loads(lines[number])
    if rng.random() < 0.1:
        lines[number] = rng.choice((NESTED, "", "null", "[]", '"x"', "7", "{"))
    else:
        _change(value, rng)
        lines[number] = json.dumps(value)
    return ("\n".join(lines) + "\n").encode()


def _change(value: Any, rng: random.Random) -> None:
    """Walk down at random and replace, remove or add."""
    while isinstance(value, dict | list) and value:
        key = rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
        inner = value[key]
        if isinstance(inner, dict | list) and inner and rng.random() < 0.7:
            value = inner
            continue
        if rng.random() < 0.2:
            del value[key]
        elif isinstance(value, dict) and rng.random() < 0.2:
            value[f"{key}_"] = inner
        else:
            value[key] = rng.choice(VALUES)
        return


def _members(content: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def _packed(members: dict[str, bytes], rng: random.Random) -> bytes:
    file = io.BytesIO()
    method = rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, content in members.items():
            archive.writestr(zipfile.ZipInfo(name), content, method)
    return file.getvalue()


def _array(content: bytes, text: bool) -> bytes:
    shape, dtype = ("()", f"<U{len(content) // 4}") if text else (f"({len(content)},)", "|u1")
    header = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}"
    padded = header.ljust(117).encode() + b"\n"
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(padded)) + padded + content


def _places(content: bytes, sign: bytes) -> list[int]:
    found, at = [], content.find(sign)
    while at >= 0:
        found.append(at)
        at = content.find(sign, at + 1)
    return found


BYTE_KINDS: tuple[Damage, ...] = (flipped_bits, overwritten, cut, missing_middle, damaged_directory)
KINDS: tuple[Damage, ...] = (
    *BYTE_KINDS, encrypted, exchanged_members, renamed_member, dropped_member, other_array_header,
    other_json,
)  # fmt: skip
TEXT_KINDS: tuple[Damage, ...] = (flipped_bits, overwritten, cut, missing_middle, other_field)
