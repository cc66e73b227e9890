"""Detect side effects of a reader with an audit hook: code run, imports, connections and writes."""

import os
import sys
from contextlib import contextmanager

from halfstep.inspection.inspector import readers


FORBIDDEN = (
    "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.kill", "subprocess.", "pty.", "exec", "import",
    "pickle.find_class", "marshal.", "ctypes.", "socket.", "urllib.", "shutil.", "os.remove", "os.rename", "os.mkdir",
    "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod", "os.chown", "os.utime", "os.putenv",
)  # fmt: skip
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

_watching: list[list[str]] = []


def _hook(event: str, args: tuple) -> None:
    if not _watching:
        return
    writes = event == "open" and isinstance(args[2], int) and args[2] & WRITING
    if writes or event.startswith(FORBIDDEN):
        _watching[-1].append(f"{event} {args!r:.200}")


sys.addaudithook(_hook)


@contextmanager
def nothing_but_reading():
    """A context that fails if the code inside does anything but read files."""
    readers()  # imports the readers' modules
    seen: list[str] = []
    _watching.append(seen)
    try:
        yield
    finally:
        _watching.pop()
    assert not seen, seen
