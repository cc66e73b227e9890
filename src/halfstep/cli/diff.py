"""`halfstep diff`: how one checkpoint follows from another, tensor by tensor."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from halfstep.cli.terminal import alarm, answer, reading, table_text
from halfstep.grouping import grouped
from halfstep.printable import printable


if TYPE_CHECKING:
    from collections.abc import Sequence

    from halfstep.inspection import Difference, TensorDifference


_LISTED = 10
_RIGHT = ("count", "values", "kept", "bits kept", "change", "cosine")
_LAYER = re.compile(r"(?:^|[./])(?:\w*layers?|h|blocks?|blk)[./](\d+)[./]")


def diff(
    a: Annotated[Path, typer.Argument(help="A checkpoint: a file, or a folder such as Hugging Face's.")],
    b: Annotated[Path, typer.Argument(help="The checkpoint to compare with it, of any kind.")],
    layers: Annotated[bool, typer.Option("--layers", help="Sum up by number of the layer, not by role.")] = False,
    tensors: Annotated[bool, typer.Option("--tensors", help="Print a line for every tensor, too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """How does checkpoint B follow from A? Cast, quantised, merged, trained further: what the bits show.

    Exit code 0 where both hold the same tensors byte for byte, 1 where they differ.
    """
    from halfstep.inspection import diff as compare, open_checkpoint

    one, other = open_checkpoint(a), open_checkpoint(b)
    try:
        with reading(sum(tensor.nbytes for tensor in one.tensors)) as progress:
            found = compare(one, other, progress)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    answer(as_json, found.to_dict, lambda: _text(found, layers, tensors))
    raise typer.Exit(0 if found.same else 1)


def _text(found: Difference, layers: bool, tensors: bool) -> str:
    remarks = [alarm(printable(text)) for text in found.remarks[:_LISTED]]
    lines = [*map(printable, found.files), *remarks, *map(printable, found.sentences)]
    if not found.tensors or found.same:
        return "\n".join(lines)
    groups = grouped((f"{_place(one, layers)}\n{one.relation.key}{one.seen}", one) for one in found.tensors)
    rows = [_row(group, _place(group[0], layers)) for group in groups.values()]
    columns = ["layer" if layers else "role", "count", "values", "stored", *_COLUMNS]
    lines += ["", table_text(columns, rows, right=_RIGHT)]
    if tensors:
        table = [[*_row([one], printable(one.name))[:1], *_row([one], "")[2:]] for one in found.tensors]
        lines += ["", table_text(["tensor", "values", "stored", *_COLUMNS], table, right=_RIGHT)]
    return "\n".join(lines)


_COLUMNS = ("B is", "kept", "bits kept", "change", "cosine")


def _place(one: TensorDifference, layers: bool) -> str:
    """The layer of a tensor, where that is asked for and its name says it; or else its role."""
    found = _LAYER.search(one.name) if layers else None
    return f"layer {found[1]}" if found else one.role


def _row(group: Sequence[TensorDifference], name: str) -> list[str]:
    """A line of the table: what is true of the group, and how far B is from A in it."""
    from halfstep.bits.pair import Change
    from halfstep.bits.sentences import percent
    from halfstep.inspection.difference_text import cosine, named, short

    stored = dict.fromkeys(short(x) if x == y else f"{short(x)} > {short(y)}" for x, y in (one.stored for one in group))
    said = dict.fromkeys(named(one.relation) for one in group)
    words = next(iter(said)) if len(said) == 1 else group[0].relation.key
    seen = f" ({group[0].seen})" if group[0].seen else ""
    held = [one.relation.change for one in group if one.relation.change is not None]
    numbers = ["100%" if group[0].relation.kind == "identical" else "-", "-", "-", "-"]
    if held:
        far = sum(held, Change())
        bits = "-" if far.bits_kept is None else percent(far.bits_kept)
        numbers = [percent(far.kept), bits, f"{far.relative:.2g}", cosine(far.cosine)]
    values = sum(one.numel for one in group)
    return [name, str(len(group)), f"{values:,}", ", ".join(stored), f"{words}{seen}", *numbers]
