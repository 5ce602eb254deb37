"""What a disk takes and does not: files that are replaced whole, sizes as people read them, and one wording of its refusals.

No torch.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from meshwright.errors import DeviceError, Finding

__all__ = ["NO_ROOM_FIX", "is_full", "readable", "replacing", "room", "unwritable", "write_whole", "writing"]

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
"""What a disk says that takes nothing more: no space, no quota, no larger file, nothing at all."""
NO_ROOM_FIX = "Free space, or name another folder"


def readable(size: float) -> str:
    """Bytes with a binary unit: 512 bytes, 3.2 KiB."""
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:,.1f} PiB"


def is_full(error: OSError) -> bool:
    """Whether it says that the disk takes nothing more."""
    return error.errno in FULL


def unwritable(where: str | Path, error: OSError, then: str = "", size: int | None = None) -> DeviceError:
    """What to say of a file or folder that could not be written; of a full disk with the space that it has left.

    where: empty where it is not known. then: what else there is to do after space was freed. size: bytes that
    were to be written, where that is known.
    """
    what = f"cannot be written: {error.strerror or error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT) and where and (free := _free(Path(where))) is not None:
        needed = f"{readable(size)} are needed, " if size is not None else ""
        what += f" ({needed}{readable(free)} free)"
    fix = NO_ROOM_FIX if is_full(error) else "Name another place, or let it be written to"
    return DeviceError(findings=[Finding(str(where) or "a file", what, f"{fix}. {then}" if then else fix)])


@contextlib.contextmanager
def writing(where: str | Path, size: int | None = None) -> Iterator[None]:
    """Around what writes `where`, of `size` bytes where that is known, and does nothing else. Raises DeviceError where it
    cannot be written."""
    try:
        yield
    except OSError as error:
        raise unwritable(where, error, size=size) from None


@contextlib.contextmanager
def room(where: str | Path) -> Iterator[None]:
    """Around what writes into `where` and reads elsewhere. Raises DeviceError where the disk takes nothing more."""
    try:
        yield
    except OSError as error:
        if not is_full(error):
            raise
        raise unwritable(where, error) from None


@contextlib.contextmanager
def replacing(path: str | Path, size: int | None = None) -> Iterator[TextIO]:
    """A text file to write, which takes the place of `path` when the block has ended: a full disk, a kill or a lost power
    leaves the old text or the new one, and no reader sees half of it. A link stays a link.

    size: its bytes, where they are known. Raises DeviceError where it cannot be written.
    """
    place = Path(path).resolve()
    aside = place.with_name(f".{place.name}.new")
    with writing(path, size):
        try:
            with open(aside, "w", encoding="utf-8") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(aside, place)
        finally:
            with contextlib.suppress(OSError):
                aside.unlink(missing_ok=True)


def write_whole(path: str | Path, text: str) -> None:
    """Puts `text` in the place of a file, as `replacing` does."""
    with replacing(path, len(text.encode())) as file:
        file.write(text)


def _free(where: Path) -> int | None:
    """Bytes that the disk of this place has left, which need not be there itself; None where that cannot be asked."""
    for folder in (where, *where.absolute().parents):
        with contextlib.suppress(OSError):
            return shutil.disk_usage(folder).free
    return None
