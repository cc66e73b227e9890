"""`halfstep inspect`: types that a checkpoint's values went through; `halfstep diff`: how one follows from another."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from halfstep.cli.terminal import Json, alarm, answer, reading, table_text
from halfstep.errors import CheckpointError, KnowledgeBaseError
from halfstep.text import grouped, percent, printable


if TYPE_CHECKING:
    from halfstep.bits.scan import Statistics
    from halfstep.bits.what_if import WhatIf
    from halfstep.inspection import Difference, Inspection, RoleReport, TensorDifference, TensorReport
    from halfstep.inspection.report import Known
    from halfstep.inspection.write import Written


def inspect(
    path: Annotated[Path, typer.Argument(help="A checkpoint: a file, or a folder such as Hugging Face's.")],
    quick: Annotated[
        bool, typer.Option("--quick", help="Only look for the last bit in use, at the speed of memory; count nothing.")
    ] = False,
    what_if: Annotated[
        str | None,
        typer.Option(
            "--what-if", metavar="FORMATS", help="Also measure casts of all matrices: all, or as in fp16,mxfp8,nf4."
        ),
    ] = None,
    to: Annotated[
        str | None, typer.Option("--to", metavar="FORMAT", help="Write the checkpoint cast; needs --out.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="The safetensors file that --to writes; a new one.")] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write the report as an HTML page, too.")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Write histograms of exponents, too: a PNG file.")] = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="Print a line for every tensor, too.")] = False,
    overlay: Annotated[
        Path | None,
        typer.Option("--overlay", help="A folder with your own knowledge base.", show_default="~/.config/halfstep/kb"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Which precision is this checkpoint, really? Reads the bits of every value, once, in bounded memory."""
    from halfstep.bits.what_if import candidates
    from halfstep.inspection import inspect as look, open_checkpoint
    from halfstep.inspection.write import check_target, write

    if (to is None) != (out is None):
        raise CheckpointError("--to FORMAT and --out FILE belong together; one of them is missing")
    if quick and (what_if or to or html or plot):
        raise CheckpointError("--quick counts nothing, so it has no --what-if, --to, --html or --plot; leave it out")
    if to is not None and out is not None:
        check_target(to, out)
    casts = [name.strip() for name in what_if.split(",") if name.strip()] if what_if is not None else []
    if what_if is not None and not casts:
        raise CheckpointError("--what-if names no format; give some, as in --what-if fp16,mxfp8, or all")
    candidates(casts)
    for given, endings in ((html, (".html", ".htm")), (plot, (".png",))):
        if given is not None:
            _check(given, endings)
    checkpoint, result = open_checkpoint(path), None
    try:
        stored = {tensor.storage: tensor.nbytes for tensor in checkpoint.tensors}
        with reading(sum(stored.values()) * (1 + bool(casts) + (to is not None))) as progress:
            report = look(checkpoint, quick=quick, casts=casts, known=_known(path, overlay), progress=progress)
            if to is not None and out is not None:
                result = write(checkpoint, report.tensors, to, out, progress)
        if html is not None:
            from halfstep.inspection.page import to_html

            _save(html, to_html(report).encode())
        if plot is not None:
            from halfstep.inspection.page import png

            _save(plot, png(report))
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    more = {"written": {**asdict(result), "path": str(result.path)}} if result else {}
    answer(as_json, lambda: report.to_dict() | more, lambda: text_of(report, tensors, result))


def _check(path: Path, endings: tuple[str, ...]) -> None:
    """Raise before anything is read if `_save` could not write the file, or if it would replace a file that is not a
    report."""
    if path.suffix.lower() not in endings:
        raise CheckpointError(f"{str(path)!r} given for a report; expected a name that ends in {endings[0]}")
    if path.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
        found = "is a folder" if path.is_dir() else "lies in no folder that can be written to"
        raise CheckpointError(f"{str(path)!r} {found}; name a file in a folder that exists")


def _save(path: Path, data: bytes) -> None:
    """Write a file atomically, replacing an existing one."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(data)
        partial.replace(path)
    except OSError as error:
        raise CheckpointError(f"{str(path)!r} cannot be written: {error.strerror}; name a file that can be") from None
    finally:
        partial.unlink(missing_ok=True)


def _known(path: Path, overlay: Path | None) -> Known | None:
    """The knowledge base's entry for the base model that the folder names; None if there is none."""
    from halfstep.inspection.report import Known
    from halfstep.kb import DEFAULT_OVERLAY, load
    from halfstep.kb.resolve import in_folder

    folder = path if path.is_dir() else path.parent
    known = load(overlay or DEFAULT_OVERLAY)
    try:
        answer = in_folder(known, str(folder))
    except KnowledgeBaseError as error:
        if path.is_dir():
            raise
        Console(stderr=True, soft_wrap=True, highlight=False, markup=False).print(
            printable(f"what the folder says of its model was not read: {error}")
        )
        return None
    if not answer.known:
        return None
    ids = ", ".join(entry.id for entry in answer.entries)
    words = "; ".join(entry.train_precision for entry in answer.entries)
    return Known(
        f"the knowledge base ({answer.tier}, {answer.how}: {ids})",
        tuple(dict.fromkeys(kind for entry in answer.entries for kind in entry.computes)),
        f"trained in {words}",
    )


_COLUMNS = ("values", "stored", "bits say", "bits", "log2", "exact bf16", "exact fp16", "fp16 subn.")
_RIGHT = ("values", "bits", "log2", "exact bf16", "exact fp16", "fp16 subn.")
_COSTS = ("to", "SQNR dB", "overflowing", "become zero", "largest error", "saved MB", "hurt most")
_UNCOUNTED = 3  # the columns of `--quick`
_SHORT = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}  # for tables of 80 columns


def text_of(report: Inspection, tensors: bool, result: Written | None) -> str:
    """The report as text; `tensors`: one line for each tensor; `result`: the file that was written, if any."""
    from halfstep.inspection.report import LISTED

    lines = [report.title, report.conclusion, *map(alarm, report.alarms), *report.claims, ""]
    width = _UNCOUNTED if report.quick else len(_COLUMNS)
    columns, roles = _COLUMNS[:width], [_role(role)[: 2 + width] for role in report.roles]
    lines.append(table_text(["role", "count", *columns], roles, right=("count", *_RIGHT)))
    lines += [f"{one.size}, {one.values:,} weights: {one.text}" for one in report.schemes]
    if tensors:
        rows = [[*_tensor(one)[:width], printable(one.name)] for one in report.tensors]
        lines += ["", table_text(["shape", *columns[1:], "tensor"], rows, right=_RIGHT)]
    if report.casts:
        costs, right = [_cast(one) for one in report.casts], _COSTS[1:-1]
        lines += ["\nwhat a cast of the matrices would cost", table_text(_COSTS, costs, right=right)]
    lines += _remarks(report.tensors, None if tensors else LISTED)
    return "\n".join(lines if result is None else [*lines, *_written(result)])


def _role(role: RoleReport) -> list[str]:
    stored = sorted(role.dtypes, key=lambda name: -role.dtypes[name])
    return [
        role.role,
        str(role.tensors),
        f"{role.numel:,}",
        ", ".join(_SHORT.get(name, name) for name in stored),
        ", ".join(dict.fromkeys(_said(kind.partition(" ")[2]) for kind in role.verdict.kinds)) or "-",
        *_numbers(role.statistics),
    ]


def _tensor(tensor: TensorReport) -> list[str]:
    return [
        "x".join(str(size) for size in tensor.shape) or "scalar",
        _SHORT.get(tensor.dtype, tensor.dtype),
        tensor.layer.scheme if tensor.layer else _said(tensor.origin.key) if tensor.origin else "-",
        *_numbers(tensor.statistics),
    ]


def _said(origin: str) -> str:
    return "?" if origin == "unknown" else origin


def _numbers(found: Statistics | None) -> list[str]:
    if found is None or not found.nonzero:
        return ["-"] * 5
    low, high = found.lowest_exponent, found.highest_exponent
    return [
        str(found.significant_bits),
        f"{low}..{high}" if low != high else f"{low}",
        percent(found.exact["bf16"]),
        percent(found.exact["fp16"]),
        percent(found.fp16_subnormal / found.nonzero),
    ]


def _cast(found: WhatIf) -> list[str]:
    total, (name, worst) = found.total, found.worst[0]
    return [
        total.format,
        total.decibels,
        percent(total.overflowing / total.values),
        percent(total.zeroed / total.values),
        f"{total.largest_error:.3g}",
        f"{total.saved / 1e6:.1f}",
        "-" if worst.harm is None else f"{printable(name)} ({worst.harm})",
    ]


def _written(result: Written) -> Iterator[str]:
    yield f"wrote {printable(str(result.path))}: {result.cast} tensors cast, {result.copied} copied"
    if result.overflowing:
        yield alarm(f"{result.overflowing:,} values were too large for the type")
    if result.zeroed:
        yield f"{result.zeroed:,} values became zero"
    yield from map(printable, result.remarks)


def _remarks(tensors: Sequence[TensorReport], most: int | None) -> Iterable[str]:
    """Lines about single tensors: non-finite values, values beyond fp16, outliers, copies."""
    remarks = []
    for tensor in tensors:
        found, name = tensor.statistics, printable(tensor.name)
        if tensor.tied_to is not None:
            remarks.append(f"{name} is tied to {printable(tensor.tied_to)}")
            continue
        if tensor.duplicate_of is not None:
            remarks.append(f"{name} equals {printable(tensor.duplicate_of)}, and is stored twice")
        if found is None:
            continue
        if found.nonfinite:
            remarks.append(
                f"{name} has {found.infinities:,} infinities and {found.nans:,} NaN in {found.values:,} values"
            )
        if found.fp16_above:
            remarks.append(f"{name} has {found.fp16_above:,} values too large for fp16, up to {found.amax:.4g}")
        if found.channels is not None and found.channels.outliers:
            many = found.channels
            remarks.append(
                f"{name} has {many.outliers} outlier channels of {many.count}: columns whose largest magnitude is at "
                f"least 6 times the median column's ({many.median:.3g}), up to {many.largest:.3g}"
            )
    yield from remarks[:most]
    if most is not None and len(remarks) > most:
        yield f"and {len(remarks) - most} more remarks: --tensors prints all, --json everything"


_RIGHT_OF_CHANGES = ("count", "values", "kept", "bits kept", "change", "cosine")
_CHANGES = ("B is", "kept", "bits kept", "change", "cosine")
_LAYER = re.compile(r"(?:^|[./])(?:\w*layers?|h|blocks?|blk)[./](\d+)[./]")


def diff(
    a: Annotated[Path, typer.Argument(help="A checkpoint: a file, or a folder such as Hugging Face's.")],
    b: Annotated[Path, typer.Argument(help="The checkpoint to compare with it, of any kind.")],
    layers: Annotated[bool, typer.Option("--layers", help="Group by layer index, not by role.")] = False,
    tensors: Annotated[bool, typer.Option("--tensors", help="Print a line for every tensor, too.")] = False,
    as_json: Json = False,
) -> None:
    """How was checkpoint B made from A? Finds casts, quantisation, merges and further training in the bits.

    Exit code 0 if both hold the same tensors byte for byte, 1 if they differ.
    """
    from halfstep.inspection import diff as compare, open_checkpoint

    one, other = open_checkpoint(a), open_checkpoint(b)
    try:
        with reading(sum(tensor.nbytes for tensor in one.tensors)) as progress:
            found = compare(one, other, progress)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    answer(as_json, found.to_dict, lambda: _changes(found, layers, tensors))
    raise typer.Exit(0 if found.same else 1)


def _changes(found: Difference, layers: bool, tensors: bool) -> str:
    from halfstep.inspection.report import LISTED

    lines = [
        *map(printable, found.files),
        *(alarm(printable(text)) for text in found.remarks[:LISTED]),
        *map(printable, found.sentences),
    ]
    if not found.tensors or found.same:
        return "\n".join(lines)
    groups = grouped((f"{_place(one, layers)}\n{one.relation.key}{one.seen}", one) for one in found.tensors)
    rows = [_change(group, _place(group[0], layers)) for group in groups.values()]
    lines += [
        "",
        table_text(
            ["layer" if layers else "role", "count", "values", "stored", *_CHANGES], rows, right=_RIGHT_OF_CHANGES
        ),
    ]
    if tensors:
        table = [[*_change([one], printable(one.name))[:1], *_change([one], "")[2:]] for one in found.tensors]
        lines += ["", table_text(["tensor", "values", "stored", *_CHANGES], table, right=_RIGHT_OF_CHANGES)]
    return "\n".join(lines)


def _place(one: TensorDifference, layers: bool) -> str:
    """The tensor's layer if `layers` is set and its name has one, else its role."""
    found = _LAYER.search(one.name) if layers else None
    return f"layer {found[1]}" if found else one.role


def _change(group: Sequence[TensorDifference], name: str) -> list[str]:
    """A row of the table: the group's relation, and the distance of B from A in it."""
    from halfstep.bits.pair import Change
    from halfstep.inspection.difference_text import cosine, named, short

    stored = dict.fromkeys(short(x) if x == y else f"{short(x)} > {short(y)}" for x, y in (one.stored for one in group))
    said = dict.fromkeys(named(one.relation) for one in group)
    words = next(iter(said)) if len(said) == 1 else group[0].relation.key
    seen = f" ({group[0].seen})" if group[0].seen else ""
    held = [one.relation.change for one in group if one.relation.change is not None]
    numbers = ["100%" if group[0].relation.kind == "identical" else "-", "-", "-", "-"]
    if held:
        far = sum(held, Change())
        numbers = [
            percent(far.kept),
            "-" if far.bits_kept is None else percent(far.bits_kept),
            f"{far.relative:.2g}",
            cosine(far.cosine),
        ]
    return [
        name,
        str(len(group)),
        f"{sum(one.numel for one in group):,}",
        ", ".join(stored),
        f"{words}{seen}",
        *numbers,
    ]
