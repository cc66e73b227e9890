"""Finds reads and writes of shared memory in PTX without a barrier between them, along any path through a kernel.

Threads of a program synchronize only at barriers. Between one thread's write and another's read of the same memory, or
the reverse, there must be one; if both addresses are in the same register, it is the same thread's memory, as in the
second half of a reduction.
"""

import itertools
import re


def unordered(ptx):
    """Pairs of lines, at least one of them a write, that a path through the kernel executes without a barrier in
    between."""
    blocks, following = _blocks(ptx)
    found = set()
    for name, events in blocks.items():
        for place, event in enumerate(events):
            if event[0] in ("ld", "st"):
                found |= {(event[2], other[2]) for other in _reached(event, name, place, blocks, following)}
    return sorted(found)


def _blocks(ptx):
    """The events (loads, stores and barriers) of each basic block, and the successors of each block."""
    body, name = ptx[ptx.index("{", ptx.index(".entry")) :], "entry"
    blocks, following, ends = {name: []}, {name: []}, False
    for line in map(str.strip, body.splitlines()):
        if label := re.match(r"(\$L__BB\w+):", line):
            if not ends:
                following[name].append(label[1])
            name, ends = label[1], False
            blocks[name], following[name] = [], []
        elif re.search(r"\bbar(rier)?\.", line):
            blocks[name].append(("barrier", "", line))
        elif access := re.search(r"\b(ld|st)(?:matrix)?\S*shared\S*\s.*?\[\s*([^\]]*?)\s*\]", line):
            blocks[name].append((access[1], access[2], line))
        elif way := re.search(r"\bbra\S*\s+(\$L__BB\w+)", line):
            following[name].append(way[1])
            rest = f"{name}'"
            if line.startswith("@"):
                following[name].append(rest)
            name, ends = rest, False
            blocks[name], following[name] = [], []
        elif re.search(r"\bret;", line) and not line.startswith("@"):
            ends = True
    return {name: _mark_reductions(events) for name, events in blocks.items()}, following


def _mark_reductions(events):
    """The events, each with whether it is a read directly followed by a write to the same register's address, or that
    write: threads of a reduction, each with its own memory."""
    pairs = [(one[0], other[0]) == ("ld", "st") and one[1] == other[1] for one, other in itertools.pairwise(events)]
    before, after = [False, *pairs], [*pairs, False]
    return [(*event, one or other) for event, one, other in zip(events, before, after, strict=bool(events))]


def _reached(event, name, place, blocks, following):
    """The accesses that a path from an event reaches before a barrier, of the other kind and at another address."""
    ways, seen = [(name, place + 1)], set()
    while ways:
        at, start = ways.pop()
        for other in blocks[at][start:]:
            if other[0] == "barrier":
                break
            if other[0] != event[0] and other[1] != event[1] and not (event[3] and other[3] and at == name):
                yield other
        else:
            new = [way for way in following[at] if way not in seen]
            seen.update(new)
            ways += [(way, 0) for way in new]
