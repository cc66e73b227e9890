"""Reads and writes of shared memory in PTX that no barrier keeps apart, along any way through a kernel.

Threads of a program meet at barriers alone. What one writes and another reads, or the other way about, must have one in
between; where addresses are the same register's, a thread meets itself, as in the second half of a reduction.
"""

import itertools
import re


def unordered(ptx):
    """Pairs of lines, a write among them, that one way through the kernel takes without a barrier in between."""
    blocks, following = _blocks(ptx)
    found = set()
    for name, events in blocks.items():
        for place, event in enumerate(events):
            if event[0] in ("ld", "st"):
                found |= {(event[2], other[2]) for other in _met(event, name, place, blocks, following)}
    return sorted(found)


def _blocks(ptx):
    """The events of each basic block: loads, stores and barriers, and where its last line goes."""
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
    return {name: _told_apart(events) for name, events in blocks.items()}, following


def _told_apart(events):
    """The events, with whether each is of a read that a write to the same register's address follows at once: threads
    of a reduction, each with places of its own."""
    pairs = [(one[0], other[0]) == ("ld", "st") and one[1] == other[1] for one, other in itertools.pairwise(events)]
    before, after = [False, *pairs], [*pairs, False]
    return [(*event, one or other) for event, one, other in zip(events, before, after, strict=bool(events))]


def _met(event, name, place, blocks, following):
    """What a way from an event on comes to before a barrier, of the other kind or by another address."""
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
