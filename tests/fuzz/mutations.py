"""Changes of valid files: numbers in known fields, trees of JSON or YAML, chunks of a format, and plain bytes.

Every function takes a `random.Random`, so that an input can be made again from its number.
"""

from __future__ import annotations

import gzip
import io
import json
import math
import pickle
import re
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import nibabel as nib
import yaml

Field = tuple[int, str]  #: offset and format of struct, without byte order
Mutation = Callable[[Random, bytes], bytes]

INTEGERS = (
    0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 64, 100, 127, 128, 255, 256, 257, 352, 512, 540, 1000, 4096, 32767,
    32768, 46341, 65535, 65536, 10**6, 2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**63 - 1, 2**63, 2**64,
)  # fmt: skip
REALS = (
    0.0, -0.0, 1.0, -1.0, 0.5, 1.5, 352.0, 1e-45, 1e-20, 1e-3, 1e9, 1e20, 3.4e38, 1e300, 1e308, math.inf, -math.inf,
    math.nan,
)  # fmt: skip
TEXTS = (
    "", " ", "0", "-1", "a", "ignore", "background", "none", "null", "true", "NaN", "1e400", "../x", "..", "/",
    "/etc/passwd",
    "a/b", "a\\b", ".nii.gz", ".png", "%00", "\x00", "\x1b[2J", "\n", "\r\n", "é", "心臓", "\ud800", "\U0001f600",
    "x" * 300, "9" * 5000, "(" * 500, "[" * 500, "{}", "[]", "*", "a: b", "(?P<patient>.)(", "(?P<patient>x)",
    "(a+)+$(?P<patient>x)", "${x}", "{0}", "%s%n", "__class__", "[bold]", "[/bold]",
)  # fmt: skip


def nested(depth: int, wide: bool = False) -> Any:
    tree: Any = {} if wide else []
    for _ in range(depth):
        tree = {"a": tree} if wide else [tree]
    return tree


def value(rng: Random) -> Any:
    """Any value that JSON or YAML can hold."""
    kind = rng.randrange(8)
    if kind == 0:
        return rng.choice((1, -1)) * rng.choice(INTEGERS)
    if kind == 1:
        return rng.choice(REALS)
    if kind == 2:
        return rng.choice(TEXTS)
    if kind == 3:
        return rng.choice((None, True, False))
    if kind == 4:
        return [value(rng) for _ in range(rng.randrange(4))] if rng.random() < 0.6 else []
    if kind == 5:
        return {rng.choice(TEXTS): value(rng) for _ in range(rng.randrange(3))}
    if kind == 6:
        return nested(rng.choice((5, 100, 400)), rng.random() < 0.5)
    return rng.choice(([0] * 1000, "x" * 20_000, 10**30, -(10**4400), [None], {"": {}}, [[0, 0]], [1.5, "a"]))


def tree(rng: Random, root: Any, values: Callable[[Random], Any] = value) -> Any:
    """A copy of nested lists and tables with one place changed."""
    if not isinstance(root, dict | list) or not root or rng.random() < 0.06:
        return values(rng)
    if isinstance(root, dict):
        keys = list(root)
        key = rng.choice(keys)
        changed = dict(root)
        kind = rng.random()
        if kind < 0.08:
            del changed[key]
        elif kind < 0.14:
            changed[rng.choice(TEXTS)] = changed.pop(key)
        elif kind < 0.2:
            changed[rng.choice((rng.choice(TEXTS), f"{key}x"))] = values(rng)
        elif kind < 0.26:
            changed[key] = changed[rng.choice(keys)]
        else:
            changed[key] = tree(rng, root[key], values)
        return changed
    items, at = list(root), rng.randrange(len(root))
    kind = rng.random()
    if kind < 0.1:
        del items[at]
    elif kind < 0.2:
        items.insert(at, values(rng))
    elif kind < 0.28:
        items = items * rng.choice((2, 3, 50))
    else:
        items[at] = tree(rng, items[at], values)
    return items


def text(content: Any) -> bytes:
    return json.dumps(content, ensure_ascii=False).encode("utf-8", "surrogatepass")


def of_json(rng: Random, data: bytes) -> bytes:
    if rng.random() < 0.15:
        return of_bytes(rng, data)
    root = json.loads(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        root = tree(rng, root)
    try:
        made = text(root)
    except (ValueError, RecursionError):  # an integer too long to print
        made = re.sub(rb"\d+", b"9" * 5000, data, count=1)
    if rng.random() < 0.04:
        made = rng.choice((b"\xef\xbb\xbf" + made, made.decode("utf-8", "replace").encode("utf-16"), b"[" * 100_000))
    return made


_YAML_WORDS = (
    "&a [*a]", "&a [1, 2]", "*a", "!!python/object/apply:os.system [ls]", "!!binary x", "!!timestamp 2001-99-99",
    "2001-13-45", "2001-01-01", "!!set {a, b}", "!!float x", "!!int ''", "0x", "0b", "0o9", "1:99", "190:20:30.15",
    "? [a]",
    "? {a: b}\n: c", "<<: 1", "<<: [1]", "<<: {a: b}", "~", "=", "|", ">", "- - - -", "[" * 3000, "{a: " * 3000,
    "%YAML 9.9",
    "---", "--- a\n--- b", "...", "\t", "'", '"', '"\\ud800"', '"\\x00"', "!!omap [a]", "!!pairs [a: b]", "!!null x",
    "!!bool x", "!a b", "1_000", "-.inf", ".nan", "1e5", "+", "-", "._", "_", "0_",
)  # fmt: skip


def of_yaml(rng: Random, data: bytes) -> bytes:
    kind = rng.random()
    if kind < 0.1:
        return of_bytes(rng, data)
    if kind < 0.45:  # a word in place of a value, or a line of its own
        lines = data.decode().splitlines()
        for _ in range(rng.choice((1, 1, 2))):
            at = rng.randrange(len(lines))
            word = rng.choice((*_YAML_WORDS, rng.choice(TEXTS)))
            head, colon, _ = lines[at].partition(":")
            lines[at : at + rng.randrange(2)] = [f"{head}{colon} {word}" if rng.random() < 0.8 else word]
        return "\n".join(lines).encode("utf-8", "surrogatepass")
    if kind < 0.47:  # a few names for ever more elements
        bomb = ["a: &a [x, x, x, x, x, x, x, x, x]"]
        for here, before in zip("bcdefghi", "abcdefgh", strict=True):
            bomb.append(f"{here}: &{here} [{', '.join([f'*{before}'] * 9)}]")
        return "\n".join([*bomb, rng.choice(("params: *i", "method: *i", "deviations: {pclmix: *i}", ""))]).encode()
    root = yaml.safe_load(data)
    for _ in range(rng.choice((1, 1, 1, 2))):
        root = tree(rng, root)
    try:
        return yaml.safe_dump(root, allow_unicode=True).encode("utf-8", "surrogatepass")
    except Exception:  # a value that YAML cannot hold
        return b"params: {x: " + b"9" * 5000 + b"}"


def of_lines(rng: Random, data: bytes) -> bytes:
    """A table such as CSV: a cell changed, a line repeated or dropped."""
    if rng.random() < 0.2:
        return of_bytes(rng, data)
    lines = data.decode().split("\n")
    at = rng.randrange(len(lines))
    cells = lines[at].split(",")
    kind = rng.random()
    if kind < 0.6:
        cells[rng.randrange(len(cells))] = rng.choice((rng.choice(TEXTS), str(rng.choice(REALS)), '"', "a,b"))
        lines[at] = ",".join(cells)
    elif kind < 0.8:
        lines.insert(at, lines[at])
    else:
        del lines[at]
    return "\n".join(lines).encode("utf-8", "surrogatepass")


def of_bytes(rng: Random, data: bytes) -> bytes:
    """Bits, bytes, integers, cuts and copies, without knowledge of the format."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 8))):
        at = rng.randrange(len(out)) if out else 0
        kind = rng.randrange(9)
        if not out or kind == 0:
            out[at:at] = rng.choice((bytes(rng.randrange(1, 64)), rng.randbytes(8), b"\xff" * 4))
        elif kind in (1, 2):
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 3:
            out[at] = rng.randrange(256)
        elif kind in (4, 5):
            size = rng.choice((2, 4, 8))
            number = rng.choice(INTEGERS) % (1 << 8 * size)
            out[at : at + size] = number.to_bytes(size, rng.choice(("little", "big")))
        elif kind == 6:
            del out[at : at + rng.choice((1, 4, 100, len(out)))]
        elif kind == 7:
            out[at:at] = out[at : at + rng.choice((4, 16, 200))]
        else:
            other = rng.randrange(len(out))
            out[at : at + 16] = out[other : other + 16]
    return bytes(out)


def of_fields(rng: Random, data: bytes, fields: Sequence[Field], order: str) -> bytes:
    """Numbers that the format knows, replaced by rare ones."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 3))):
        offset, kind = rng.choice(fields)
        size = struct.calcsize(kind)
        if offset + size > len(out):
            continue
        if kind in "fd":
            with_limits = rng.choice(REALS)
            packed = struct.pack(order + kind, with_limits if kind == "d" or abs(with_limits) < 3e38 else math.inf)
        elif kind.endswith("s"):
            packed = rng.choice((bytes(size), rng.randbytes(size), b"n+1\0"[:size], b"ni1\0"[:size]))
        else:
            packed = (rng.choice((1, -1)) * rng.choice(INTEGERS) % (1 << 8 * size)).to_bytes(
                size, "little" if order == "<" else "big"
            )
        out[offset : offset + size] = packed
    return bytes(out)


def _of_template(dtype: Any) -> list[Field]:
    found = []
    for name in dtype.names:
        kind, offset = dtype.fields[name][:2]
        base, count = (kind.subdtype[0], int(math.prod(kind.shape))) if kind.subdtype else (kind, 1)
        code = f"{base.itemsize}s" if base.kind == "S" else base.char.replace("q", "q")
        found += [(offset + k * base.itemsize, code) for k in range(count)]
    return found


_NIFTI = {348: _of_template(nib.Nifti1Header.template_dtype), 540: _of_template(nib.Nifti2Header.template_dtype)}
#: Those that decide on sizes and types, for more weight.
_SIZES = {348: [(40 + 2 * k, "h") for k in range(8)] + [(70, "h"), (108, "f"), (112, "f"), (116, "f"), (344, "4s")]}
_SIZES[540] = [(12, "h"), (14, "h")] + [(16 + 8 * k, "q") for k in range(8)] + [(168, "q"), (176, "d"), (184, "d")]


def of_nifti(rng: Random, data: bytes) -> bytes:
    if rng.random() < 0.2:
        return of_bytes(rng, data)
    order = "<" if data[:4] in (struct.pack("<i", 348), struct.pack("<i", 540)) else ">"
    size = struct.unpack(order + "i", data[:4])[0]
    known = size if size in _NIFTI else 348
    fields = rng.choice((_NIFTI, _SIZES))[known]
    if rng.random() < 0.2:  # header extensions, with a matching or another offset of the voxels
        length = rng.choice((16, 32, 17, 8, 0, -16, 2**31 - 1))
        body = struct.pack(order + "4Bii", 1, 0, 0, 0, length, rng.choice((0, 2, 4, 6, 44))) + b"x" * 8
        data = data[:known] + body + data[known + 4 :]
        if known == 348 and rng.random() < 0.7:
            data = data[:108] + struct.pack(order + "f", known + len(body)) + data[112:]
    return of_fields(rng, data, fields, order)


def of_gzip(rng: Random, data: bytes) -> bytes:
    """The content changed, the container changed, more content behind, or zeros that unpack to hundreds of MiB."""
    kind = rng.random()
    if kind < 0.15:
        return of_bytes(rng, data)
    plain = gzip.decompress(data)
    if kind < 0.17:
        return bomb(plain, rng.choice((8, 64, 300)) << 20)
    if kind < 0.22:
        return data + rng.choice((data, b"x", bytes(100), gzip.compress(bytes(1 << 16)), b"\x1f\x8b", data[:20]))
    if kind < 0.3:
        return data[: rng.randrange(len(data))]
    return gzip.compress(of_nifti(rng, plain), compresslevel=1)


def bomb(head: bytes, size: int) -> bytes:
    """A gzip file of `head` and `size` zeros; with dimensions of 512 x 512 x n they are its voxels."""
    packer = zlib.compressobj(1, zlib.DEFLATED, 31)
    head = head[:42] + struct.pack("<3h", 512, 512, max(1, min(32767, size // 2 // 512**2))) + head[48:]
    parts = [packer.compress(head)]
    parts += [packer.compress(bytes(1 << 20)) for _ in range(size >> 20)]
    return b"".join([*parts, packer.flush()])


def _chunks(data: bytes) -> list[tuple[bytes, bytes]]:
    found, at = [], 8
    while at + 12 <= len(data):
        length = int.from_bytes(data[at : at + 4], "big")
        found.append((data[at + 4 : at + 8], data[at + 8 : at + 8 + length]))
        at += 12 + length
    return found


def of_png(rng: Random, data: bytes) -> bytes:
    """Chunks changed, repeated, moved, added or dropped, mostly with a right checksum."""
    if rng.random() < 0.2:
        return of_bytes(rng, data)
    chunks = _chunks(data)
    for _ in range(rng.choice((1, 1, 2))):
        at = rng.randrange(len(chunks))
        name, body = chunks[at]
        kind = rng.random()
        if kind < 0.4:  # the header
            fields = [(0, "I"), (4, "I"), (8, "B"), (9, "B"), (10, "B"), (11, "B"), (12, "B")]
            chunks[0] = (chunks[0][0], of_fields(rng, chunks[0][1], fields, ">"))
        elif kind < 0.55:
            chunks[at] = (name, of_bytes(rng, body))
        elif kind < 0.62:
            packed = zlib.compress(bytes(rng.choice((1000, 1 << 20, 64 << 20))), 1)
            extra = rng.choice(((b"IDAT", packed), (b"zTXt", b"a\0\0" + packed), (b"iTXt", b"a\0\1\0\0\0" + packed)))
            chunks.insert(at + 1, rng.choice((extra, (b"iCCP", b"a\0\0" + packed))))
        elif kind < 0.75:
            names = (b"PLTE", b"tRNS", b"gAMA", b"acTL", b"fcTL", b"fdAT", b"eXIf", b"IEND", b"IDAT", b"abcd", b"tEXt")
            chunks.insert(at, (rng.choice(names), rng.randbytes(rng.choice((0, 1, 4, 26, 300)))))
        elif kind < 0.87:
            chunks.insert(rng.randrange(len(chunks)), chunks[at])
        elif len(chunks) > 2:
            del chunks[at]
    out = bytearray(data[:8])
    for name, body in chunks:
        length = len(body) if rng.random() > 0.02 else rng.choice(INTEGERS) % 2**32
        check = zlib.crc32(name + body) if rng.random() > 0.03 else 0
        out += struct.pack(">I", length) + name + body + struct.pack(">I", check)
    return bytes(out)


def of_bmp(rng: Random, data: bytes) -> bytes:
    if rng.random() < 0.25:
        return of_bytes(rng, data)
    fields = [(2, "I"), (10, "I"), (14, "I"), (26, "H"), (28, "H"), *((at, "I") for at in range(18, 54, 4) if at != 26)]
    return of_fields(rng, data, fields, "<")


def of_jpeg(rng: Random, data: bytes) -> bytes:
    """Segments before the scan: their numbers, their lengths, their order."""
    if rng.random() < 0.25:
        return of_bytes(rng, data)
    segments, at = [], 2
    while at + 4 <= len(data) and data[at] == 0xFF and data[at + 1] != 0xDA:
        length = int.from_bytes(data[at + 2 : at + 4], "big")
        segments.append(data[at : at + 2 + length])
        at += 2 + length
    rest, place = data[at:], rng.randrange(len(segments))
    kind = rng.random()
    if kind < 0.6:
        part = segments[place]
        fields = [(k, rng.choice("BHH")) for k in range(2, min(len(part) - 1, 40))]
        segments[place] = of_fields(rng, part, fields or [(0, "B")], ">")
    elif kind < 0.75:
        segments.insert(rng.randrange(len(segments)), segments[place])
    elif kind < 0.85:
        exif = b"Exif\0\0" + rng.choice((b"II*\0\x08\0\0\0", b"MM\0*\0\0\0\x08", b"II")) + rng.randbytes(20)
        segments.insert(0, b"\xff\xe1" + struct.pack(">H", len(exif) + 2) + exif)
    else:
        rest = of_bytes(rng, rest)
    return data[:2] + b"".join(segments) + rest


def tiff_entries(data: bytes) -> tuple[str, list[int]]:
    """Byte order and the offsets of all entries of a classic TIFF."""
    order, found, seen = ("<" if data[:2] == b"II" else ">"), [], set()
    at = struct.unpack_from(order + "I", data, 4)[0]
    while at and at + 2 <= len(data) and at not in seen:
        seen.add(at)
        count = struct.unpack_from(order + "H", data, at)[0]
        found += [at + 2 + 12 * k for k in range(count) if at + 14 + 12 * k <= len(data)]
        end = at + 2 + 12 * count
        at = struct.unpack_from(order + "I", data, end)[0] if end + 4 <= len(data) else 0
    return order, found


_TIFF_TAGS = (
    254,
    256,
    257,
    258,
    259,
    262,
    266,
    270,
    273,
    277,
    278,
    279,
    284,
    317,
    320,
    322,
    323,
    324,
    325,
    330,
    338,
    339,
)


def of_tiff(rng: Random, data: bytes) -> bytes:
    """Entries of the directories: tag, type, number and value; the XML of OME; offsets of directories."""
    kind = rng.random()
    if kind < 0.15 or data[2:4] not in (b"*\0", b"\0*"):
        return of_bytes(rng, data)
    if kind < 0.3 and b"<OME" in data:
        start, end = data.index(b"<OME"), data.index(b"</OME>")
        xml = data[start:end]
        found = list(re.finditer(rb'"([^"]*)"', xml))
        hit = rng.choice(found)
        size = hit.end(1) - hit.start(1)
        new = rng.choice((str(rng.choice(INTEGERS)).encode(), b"-1", b"XYZTC", b"float", b"other.ome.tif", b"x"))
        xml = xml[: hit.start(1)] + new[:size].ljust(size) + xml[hit.end(1) :]
        return data[:start] + xml + data[end:]
    order, entries = tiff_entries(data)
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 3))):
        at, part = rng.choice(entries), rng.random()
        if part < 0.1:
            struct.pack_into(order + "H", out, at, rng.choice(_TIFF_TAGS))
        elif part < 0.25:
            struct.pack_into(order + "H", out, at + 2, rng.choice((1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 16, 0, 99)))
        elif part < 0.4:
            struct.pack_into(order + "I", out, at + 4, rng.choice(INTEGERS) % 2**32)
        else:
            code = struct.unpack_from(order + "H", out, at)[0]
            usual = {259: (1, 2, 5, 6, 7, 8, 32773, 32946, 34712, 34887, 34925, 50000), 317: (1, 2, 3), 262: range(9)}
            number = rng.choice(tuple(usual.get(code, ())) or INTEGERS) % 2**32
            if struct.unpack_from(order + "H", out, at + 2)[0] == 3:
                struct.pack_into(order + "HH", out, at + 8, number % 2**16, 0)
            else:
                struct.pack_into(order + "I", out, at + 8, number)
    if rng.random() < 0.05:
        struct.pack_into(order + "I", out, 4, rng.choice((0, 8, len(out) - 1, len(out) + 9, 2**32 - 1)))
    return bytes(out)


def of_dicom(rng: Random, data: bytes) -> bytes:
    """Elements of an explicit little-endian file: value, kind, length; also removed or repeated."""
    if rng.random() < 0.2:
        return of_bytes(rng, data)
    out, elements, at = bytearray(data), [], 132
    while at + 8 <= len(data):
        long = data[at + 4 : at + 6] in (b"OB", b"OW", b"OF", b"SQ", b"UN", b"UT", b"UC", b"UR", b"OD", b"OL")
        head = 12 if long else 8
        length = int.from_bytes(data[at + 8 : at + 12] if long else data[at + 6 : at + 8], "little")
        elements.append((at, head, length))
        at += head + length
    for _ in range(rng.choice((1, 1, 2))):
        at, head, length = rng.choice(elements)
        kind, old = rng.random(), data[at + head : at + head + length]
        if kind < 0.5 and length:
            if data[at + 4 : at + 6] in (b"US", b"SS", b"UL"):
                new = (rng.choice(INTEGERS) % (1 << 8 * min(length, 4))).to_bytes(length, "little")
            elif length < 200:
                words = (
                    "-1",
                    "0",
                    "nan",
                    "inf",
                    "1e400",
                    "abc",
                    "\\",
                    "1\\2",
                    "9" * 64,
                    "-0",
                    "1e-9",
                    "",
                    "1\\0\\0\\0\\1\\0",
                )
                new = rng.choice((*words, *TEXTS[:16])).encode("utf-8", "replace")[:length].ljust(length)
            else:
                new = of_bytes(rng, old)[:length].ljust(length)
            out[at + head : at + head + length] = new
        elif kind < 0.62:
            out[at + 4 : at + 6] = rng.choice(
                (b"SQ", b"DS", b"IS", b"US", b"UN", b"OB", b"XX", b"\0\0", b"PN", b"UI", b"AT")
            )
        elif kind < 0.74:
            size, place = (4, at + 8) if head == 12 else (2, at + 6)
            out[place : place + size] = (rng.choice(INTEGERS) % (1 << 8 * size)).to_bytes(size, "little")
        elif kind < 0.84:
            out[at : at + 4] = rng.choice(elements)[0].to_bytes(4, "little")[:4]
        elif kind < 0.92:
            del out[at : at + head + length]
            break
        else:
            out[at:at] = data[at : at + head + length]
            break
    return bytes(out)


def of_nrrd(rng: Random, data: bytes) -> bytes:
    """Lines of the header, and the voxels behind it."""
    if rng.random() < 0.2:
        return of_bytes(rng, data)
    head, gap, body = data.partition(b"\n\n")
    if rng.random() < 0.15:
        body = rng.choice((of_bytes(rng, body), b"", gzip.compress(bytes(200 << 20), 1), body[: len(body) // 2]))
    lines = head.decode("utf-8", "replace").split("\n")
    for _ in range(rng.choice((1, 1, 2))):
        at = rng.randrange(len(lines))
        key, colon, said = lines[at].partition(":")
        kind = rng.random()
        if kind < 0.35 and colon:  # one number of a line
            numbers = list(re.finditer(r"-?[\d.]+", said))
            if numbers:
                hit = rng.choice(numbers)
                new = str(rng.choice((rng.choice(INTEGERS), rng.choice(REALS), -1)))
                said = said[: hit.start()] + new + said[hit.end() :]
            lines[at] = key + colon + said
        elif kind < 0.7 and colon:
            words = (
                "none", "double", "block", "hex", "bzip2", "ascii", "raw", "left-handed", "(1,0,0) none (0,0,1)",
                "9" * 5000,
                "int64", "float", "uint8", "scanner-xyz", "()", "(1,0", "nan nan nan", "1 2", "big", "LIST", "x.raw",
            )  # fmt: skip
            lines[at] = f"{key}{colon} {rng.choice((*words, *TEXTS))}"
        elif kind < 0.8:
            lines.insert(
                at,
                rng.choice(("data file: /etc/passwd", "datafile: x", "block size: 4", "byte skip: -1", "line skip: 9")),
            )
        elif kind < 0.9:
            lines.insert(at, lines[rng.randrange(len(lines))])
        elif len(lines) > 1:
            del lines[at]
    return "\n".join(lines).encode("utf-8", "surrogatepass") + gap + body


def of_zip(rng: Random, data: bytes, member: Mutation = of_bytes) -> bytes:
    """Names and contents of a zip written again with right checksums, or its bytes."""
    if rng.random() < 0.2:
        return of_bytes(rng, data)
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as source:
        parts = [[info.filename, source.read(info), info.compress_type] for info in source.infolist()]
    for _ in range(rng.choice((1, 1, 2))):
        at = rng.randrange(len(parts))
        kind = rng.random()
        if kind < 0.5:
            parts[at][1] = member(rng, parts[at][1])
        elif kind < 0.75:
            parts[at][0] = rng.choice(
                (parts[at][0].replace("images", ""), "a.nii.gz", "..", "a/../../b.nii.gz", *TEXTS[:30])
            )
            parts[at][0] = parts[at][0].encode("utf-8", "replace").decode() or "x"
        elif kind < 0.85:
            parts.append(list(parts[at]))
        elif kind < 0.92:
            parts[at][2] = rng.choice((zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2, zipfile.ZIP_STORED))
        elif len(parts) > 1:
            del parts[at]
    with zipfile.ZipFile(buffer, "w") as target, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of two entries with one name
        for name, content, method in parts:
            info = zipfile.ZipInfo(name)
            info.compress_type = method
            target.writestr(info, content)
    return buffer.getvalue()


def _of_pickle(rng: Random, data: bytes) -> bytes:
    """The pickle of a checkpoint: opcodes, memo numbers, lengths, module names."""
    if rng.random() < 0.3:
        names = (b"collections", b"torch._utils", b"torch", b"FloatStorage", b"_rebuild_tensor_v2", b"OrderedDict")
        present = [name for name in names if name in data]
        if present:
            return data.replace(
                rng.choice(present), rng.choice((b"os", b"posix", b"builtins", b"eval", b"IntStorage", b"x")), 1
            )
    if rng.random() < 0.1:
        return pickle.dumps(rng.choice((value(rng), {1: 2}, set(), print, b"x")), protocol=2)
    return of_bytes(rng, data)


def of_checkpoint_bytes(rng: Random, data: bytes) -> bytes:
    """A checkpoint with right checksums, so that its pickle is reached."""
    return of_zip(rng, data, _of_pickle)


def of_safetensors(rng: Random, data: bytes) -> bytes:
    if rng.random() < 0.3:
        return of_bytes(rng, data)
    length = int.from_bytes(data[:8], "little")
    try:
        head = text(tree(rng, json.loads(data[8 : 8 + length])))
    except ValueError:
        head = data[8 : 8 + length]
    size = len(head) if rng.random() > 0.05 else rng.choice(INTEGERS) % 2**64
    return size.to_bytes(8, "little") + head + data[8 + length :]
