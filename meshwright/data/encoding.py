"""Which bytes are text, in which encoding, and where they are not.

UTF-8 unless told otherwise; never a guess in the middle of a file, never a replacement character. `auto` decides once for
a whole file: UTF-8 when all of it is, else GB 18030 (of which GBK is a part) when all of it is and no line of it is UTF-8, else
an error.
Nothing here depends on the locale.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable

from meshwright.errors import DataError, Finding

__all__ = ["AUTO", "bad_byte", "decide", "problem_with", "skip_mark", "whole_characters"]

AUTO = "auto"
UTF8_MARK = b"\xef\xbb\xbf"
OTHER_MARKS = (
    (b"\xff\xfe\x00\x00", "UTF-32"),
    (b"\x00\x00\xfe\xff", "UTF-32"),
    (b"\xff\xfe", "UTF-16"),
    (b"\xfe\xff", "UTF-16"),
)
LONG_LINE = 1 << 22
NAME_IT = "If it has one encoding, name it, e.g. encoding: gbk or big5"
OFFER = "If the file is GBK, set encoding: gbk; encoding: auto decides for each file"


def problem_with(name: str) -> str | None:
    """Why files cannot be read in this encoding, or None. Lines are cut at byte 0A, so ASCII must keep its bytes."""
    if name == AUTO:
        return None
    try:
        same = b"{a:\n}".decode(name) == "{a:\n}" and "{a:\n}".encode(name) in (b"{a:\n}", UTF8_MARK + b"{a:\n}")
    except (LookupError, UnicodeError):
        same = False
    if same:
        return None
    try:
        codecs.lookup(name)
    except LookupError:
        return f"there is no encoding {name!r}"
    return f"{name} does not keep the bytes of ASCII, so lines cannot be found; convert the file to UTF-8"


def is_utf8(name: str) -> bool:
    return codecs.lookup(name).name in ("utf-8", "utf-8-sig")


def skip_mark(head: bytes, name: str, where: str) -> int:
    """Bytes to drop at the start of a file: one UTF-8 byte-order mark, or none.

    head: the first bytes of the file (1 KiB is plenty). Raises DataError for UTF-16 and UTF-32, with or without a mark,
    and for a UTF-8 mark in a file that is said to be something else.
    """
    for mark, kind in OTHER_MARKS:
        if head.startswith(mark):
            raise _refused(where, f"starts with the byte-order mark {mark.hex(' ').upper()} of {kind}")
    even, odd = head[:1024:2], head[1:1024:2]
    if odd and max(even.count(0), odd.count(0)) > 0.7 * len(odd) and min(even.count(0), odd.count(0)) < 0.1 * len(odd):
        raise _refused(where, "has a NUL in every other byte: UTF-16 without a byte-order mark")
    if not head.startswith(UTF8_MARK):
        return 0
    if name != AUTO and not is_utf8(name):
        what = f"starts with the byte-order mark of UTF-8, but encoding is {name}"
        raise DataError(findings=[Finding(where, what, "Set encoding: utf-8")])
    return len(UTF8_MARK)


def _refused(where: str, what: str) -> DataError:
    return DataError(findings=[Finding(where, what, "Convert the file to UTF-8 first")])


def decide(read: Callable[[], Iterable[bytes]], where: str) -> str:
    """The encoding of a whole file, "utf-8" or "gb18030".

    read: gives the file's bytes in blocks, from the start, each time it is called. Raises DataError with the first byte that
    is not UTF-8 when the file is neither, or when other lines of it are UTF-8: bytes of UTF-8 often pass for GBK.
    """
    bad = _first_bad(read(), "utf-8")
    if bad is None:
        return "utf-8"
    line, at = bad
    what = f"the first byte that is not UTF-8 is at byte offset {at} of the file"
    if _first_bad(read(), "gb18030") is not None:
        raise DataError(findings=[Finding(f"{where}, line {line}", f"neither UTF-8 nor GB 18030: {what}", NAME_IT)])
    other = _utf8_line(read())
    if other is not None:
        raise DataError(findings=[Finding(f"{where}, line {line}", f"mixed: {what}, but line {other} is UTF-8", NAME_IT)])
    return "gb18030"


def _first_bad(blocks: Iterable[bytes], name: str) -> tuple[int, int] | None:
    """(line, offset in the file) of the first byte that is not text in this encoding."""
    decoder = codecs.getincrementaldecoder(name)("strict")
    offset, line = 0, 1
    for block in blocks:
        try:
            decoder.decode(block)
        except UnicodeDecodeError as error:
            # positions count from the start of a character that the blocks cut, which may lie in the block before
            at = error.start - (len(error.object) - len(block))
            return line + block.count(b"\n", 0, max(0, at)), offset + at
        offset += len(block)
        line += block.count(b"\n")
    pending = len(decoder.getstate()[0])
    try:
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return line, offset - pending
    return None


def _utf8_line(blocks: Iterable[bytes]) -> int | None:
    """The first line that is surely UTF-8: it has at least four characters of three bytes. By chance a line of GBK is valid
    UTF-8 with that many about once in 10^9."""
    line = 1
    rest = b""
    for block in blocks:
        *lines, rest = (rest + block).split(b"\n")
        for number, data in enumerate(lines, start=line):
            if _surely_utf8(data):
                return number
        line += len(lines)
        if len(rest) > LONG_LINE:
            rest = b""  # a line that long is not looked at as a whole
    return line if _surely_utf8(rest) else None


def _surely_utf8(data: bytes) -> bool:
    if data.isascii():
        return False
    try:
        return sum(character >= "\u0800" for character in data.decode("utf-8")) >= 4
    except UnicodeDecodeError:
        return False


def bad_byte(byte: int, name: str, in_line: int | None, in_file: int) -> str:
    """What is wrong with a byte at these offsets, of its line (None: the line began before what was read) and its file."""
    if in_line is None:
        return f"not {name}: byte 0x{byte:02X} at byte offset {in_file} of the file"
    line = f"byte offset {in_line} of the line, which starts at byte offset {in_file - in_line} of the file"
    return f"not {name}: byte 0x{byte:02X} at {line}"


def whole_characters(data: bytes, name: str) -> int:
    """Length of the longest prefix that does not end inside a character. Bytes that are no text at all count as whole."""
    decoder = codecs.getincrementaldecoder(name)("strict")
    try:
        decoder.decode(data)
    except UnicodeDecodeError:
        return len(data)
    pending = len(decoder.getstate()[0])
    return len(data) - pending
