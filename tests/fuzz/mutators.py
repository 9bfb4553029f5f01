"""Damage: bytes of any file, and the parts of archives, JSON and safetensors files that still parse."""

import io
import json
import random
import re
import struct
import zipfile
from collections.abc import Callable, Sequence
from typing import Any

Mutator = Callable[[bytes, Sequence[bytes], random.Random], bytes]
"""(file, other files of its kind, random numbers) → damaged file."""

_NUMBERS = (
    0,
    1,
    2,
    0x7F,
    0x80,
    0xFF,
    0x7FFF,
    0x8000,
    0xFFFF,
    0x7FFFFFFF,
    0x80000000,
    0xFFFFFFFF,
    (1 << 63) - 1,
    1 << 63,
)
_TOKENS = (
    b"\0",
    b"../",
    b"[" * 5000,
    b"{" * 5000,
    b"9" * 5000,
    b"NaN",
    b"1e999",
    b"-1",
    b"\xef\xbb\xbf",
    b"\xff\xfe",
    b"\x1b[31m",
    b"\r\n",
    b"&a [*a,*a]",
    b"\xed\xa0\x80",
    b"'",
    b'"',
    b"/etc",
    b"%s%n",
)
HOSTILE: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    255,
    1 << 31,
    1 << 63,
    10**30,
    10**400,
    1e308,
    float("inf"),
    float("-inf"),
    float("nan"),
    "",
    "x",
    "\0",
    "\ud800",
    "../x",
    "/",
    "\x1b[31m",
    "a" * 5000,
    "NaN",
    "float64",
    [],
    {},
    [[]],
    [None],
    [1, 2, 3],
    {"a": 1},
    [[[[[[]]]]]],
    "(a+)+$",
    "é\u202e",
    0.5,
    -0.0,
)


def flip(data: bytes, others: Sequence[bytes], rng: random.Random) -> bytes:
    """Change one to eight places: bits, bytes, numbers at their bounds, pieces cut, repeated or from elsewhere."""
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        at = rng.randrange(len(found) + 1)
        # headers are where a parser decides
        at = min(at, rng.choice((len(found), len(found), 64, 512)))
        length = rng.choice((1, 2, 4, 8, 16, rng.randrange(1, 200)))
        kind = rng.randrange(8)
        if kind == 0 and at < len(found):
            found[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and at < len(found):
            found[at] = rng.randrange(256)
        elif kind == 2:
            width, order = rng.choice((1, 2, 4, 8)), rng.choice("<>")
            number = rng.choice(_NUMBERS) & ((1 << 8 * width) - 1)
            found[at : at + width] = struct.pack(order + {1: "B", 2: "H", 4: "I", 8: "Q"}[width], number)
        elif kind == 3:
            del found[at : at + length]
        elif kind == 4:
            found[at:at] = found[at : at + length]
        elif kind == 5:
            other = rng.choice(others)
            start = rng.randrange(len(other) + 1)
            found[at : at + length] = other[start : start + length]
        elif kind == 6:
            found[at:at] = rng.choice(_TOKENS)
        elif rng.random() < 0.3:
            del found[at:]
    return bytes(found)


def json_text(data: bytes, others: Sequence[bytes], rng: random.Random) -> bytes:
    """Put hostile values into JSON, take keys away, repeat one, or nest it beyond measure."""
    value = edit(json.loads(data), rng)
    text = json.dumps(value, ensure_ascii=rng.random() < 0.5)
    if rng.random() < 0.1:
        text = rng.choice(
            ("[" * 5000, text.replace(":", ":" + "[" * 3000, 1), "9" * 5000, text.replace("{", '{"a":1,"a":2,', 1))
        )
    return text.encode("utf-8", "surrogatepass")


def edit(value: Any, rng: random.Random) -> Any:
    """Return parsed JSON with one to three hostile values in it."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        value = _edit_once(value, rng)
    return value


def _edit_once(value: Any, rng: random.Random) -> Any:
    if isinstance(value, (dict, list)) and value and rng.random() < 0.9:
        key = rng.choice(sorted(value, key=str)) if isinstance(value, dict) else rng.randrange(len(value))
        copy: Any = dict(value) if isinstance(value, dict) else list(value)
        if rng.random() < 0.1:
            del copy[key]
        elif rng.random() < 0.05 and isinstance(copy, dict):
            copy[str(rng.choice(HOSTILE))[:50]] = rng.choice(HOSTILE)
        else:
            copy[key] = _edit_once(copy[key], rng)
        return copy
    return rng.choice(HOSTILE)


def safetensors(data: bytes, others: Sequence[bytes], rng: random.Random) -> bytes:
    """Edit the header of a safetensors file, the card in its metadata too, and write its length anew."""
    length = struct.unpack("<Q", data[:8])[0]
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    meta = header.get("__metadata__", {})
    cards = [key for key in meta if meta[key].startswith("{")]
    if cards and rng.random() < 0.5:
        meta[cards[0]] = json_text(meta[cards[0]].encode(), others, rng).decode("utf-8", "surrogatepass")
    elif rng.random() < 0.3:
        names = sorted(set(header) - {"__metadata__"})
        a, b = rng.choice(names), rng.choice(names)
        header[a], header[b] = header[b], header[a]
    else:
        header = edit(header, rng)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text) + rng.choice((0, 0, 0, 0, 1, -1))) + text + body


def zipped(inner: Mutator) -> Mutator:
    """Damage members of an archive, or the list of them, and write it whole."""

    def mutate(data: bytes, others: Sequence[bytes], rng: random.Random) -> bytes:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = [(entry.filename, archive.read(entry)) for entry in archive.infolist()]
        at = rng.randrange(len(members))
        name, content = members[at]
        kind = rng.randrange(8)
        if kind < 4:  # the first member with a structure, else this one
            at = next((i for i, (n, _) in enumerate(members) if n.endswith((".pkl", ".json"))), at)
            members[at] = (members[at][0], inner(members[at][1], [m for _, m in members], rng))
        elif kind == 4:
            members[at] = (name, flip(content, [m for _, m in members], rng))
        elif kind == 5:
            del members[at]
        elif kind == 6:
            members[at] = (rng.choice(("../x", "", "a/b/c", name + "x", "\x1b", name.upper())), content)
        else:
            members.append((name, b"\0" * rng.choice((10, 1 << 20, 100 << 20)) if rng.random() < 0.1 else content))
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w", rng.choice((0, 0, 0, 8))) as archive:
            for name, content in members:
                archive.writestr(name or "x", content)
        return file.getvalue()

    return mutate


def xml_text(data: bytes, others: Sequence[bytes], rng: random.Random) -> bytes:
    """Put hostile values into attributes and texts of XML, take elements away, repeat one, or nest too deeply."""
    text = data.decode("utf-8", "replace")
    for _ in range(rng.choice((1, 1, 2, 3))):
        places = list(re.finditer(rng.choice((r'"[^"]*"', r">[^<]+<", r"<[a-z_]+ [^>]*/?>", r"</?[a-z_]+")), text))
        if not places:
            continue
        at = rng.choice(places)
        value = re.sub('[<&"]', "", str(rng.choice(HOSTILE))[:5000])
        first, last = at[0][0], at[0][-1]
        put = rng.choice((f"{first}{value}{last}", f"{first}{value}{last}", at[0] * 2, "", at[0] + "<a>" * 5000))
        text = text[: at.start()] + put + text[at.end() :]
    return text.encode("utf-8", "surrogatepass")
