"""A process that tokenises chunks: `python -m meshwright.data.worker`, frames on its standard input and output.

A frame is the lengths of its two parts (two unsigned 64-bit numbers), JSON, and raw bytes. The process is started with
`subprocess` and not with `multiprocessing`, so that a caller's own script needs no `__main__` guard. It ends when its input
ends, so none outlives the process that started it, however that one ended.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import struct
import sys
import threading
import traceback
from typing import IO, Any

LENGTHS = struct.Struct("<QQ")


def send(stream: IO[bytes], values: dict[str, Any], *parts: bytes) -> None:
    """Write one frame."""
    text = json.dumps(values).encode("ascii")
    stream.write(LENGTHS.pack(len(text), sum(map(len, parts))))
    stream.write(text)
    for part in parts:
        stream.write(part)
    stream.flush()


def receive(stream: IO[bytes]) -> tuple[dict[str, Any], bytes]:
    """Read one frame. Raises EOFError where the other side has gone."""
    text, size = LENGTHS.unpack(_exactly(stream, LENGTHS.size))
    values = json.loads(_exactly(stream, text))
    return values, _exactly(stream, size)


def _exactly(stream: IO[bytes], size: int) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        raise EOFError
    return data


def _listen(stream: IO[bytes], frames: queue.Queue[tuple[dict[str, Any], bytes]]) -> None:
    try:
        while True:
            frames.put(receive(stream))
    except (EOFError, OSError):
        os._exit(0)  # at once, also from the middle of a long encode: nobody is left to read the result


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a stray print must not fall between frames
    frames: queue.Queue[tuple[dict[str, Any], bytes]] = queue.Queue()
    threading.Thread(target=_listen, args=(sys.stdin.buffer, frames), daemon=True).start()

    from meshwright.data.parse import Keys, Piece
    from meshwright.data.tokenize import Form, Job
    from meshwright.data.tokenizer import Tokenizer

    settings, _ = frames.get()
    form = Form(tuple(settings["prefix"]), tuple(settings["suffix"]), settings["itemsize"])
    names = settings["label_names"]
    keys = [Keys(**values) for values in settings["keys"]]
    job = Job(
        Tokenizer.load(settings["tokenizer"]),
        form,
        keys,
        settings["on_bad_row"],
        None if names is None else frozenset(names),
    )
    while True:
        chunk, data = frames.get()
        pieces, at = [], 0
        for size, values in chunk["pieces"]:
            pieces.append(Piece(data=data[at : at + size], **values))
            at += size
        try:
            result = job.run(chunk["source"], pieces)
        except Exception:  # whatever it is, the parent tells it
            send(output, {"traceback": traceback.format_exc()})
        else:
            sizes = [len(result.tokens), len(result.ends), len(result.prompts)]
            send(output, {"sizes": sizes, "result": result.header()}, result.tokens, result.ends, result.prompts)


if __name__ == "__main__":
    main()
