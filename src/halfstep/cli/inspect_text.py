"""What `halfstep inspect` prints: the verdict, what contradicts it, and a line a role or a tensor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console

from halfstep.bits.sentences import percent
from halfstep.bits.statistics import Statistics
from halfstep.bits.what_if import WhatIf
from halfstep.cli.terminal import show_table
from halfstep.inspection import Inspection, RoleReport, TensorReport
from halfstep.inspection.report import LISTED
from halfstep.inspection.write import Written
from halfstep.printable import printable


_COLUMNS = ("values", "stored", "bits say", "bits", "log2", "exact bf16", "exact fp16", "fp16 subn.")
_RIGHT = ("values", "bits", "log2", "exact bf16", "exact fp16", "fp16 subn.")
_UNCOUNTED = 3  # the columns of a quick look
_SHORT = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}  # for tables of 80 columns


def show(report: Inspection, tensors: bool) -> None:
    """Print a report; with `tensors` a line for each of them."""
    lines = Console(soft_wrap=True, highlight=False, markup=False)
    for text in (report.title, report.conclusion):
        lines.print(text)
    for text in report.alarms:
        lines.print(text, style="bold yellow")
    for text in report.claims:
        lines.print(text)
    lines.print()
    width = _UNCOUNTED if report.quick else len(_COLUMNS)
    columns = _COLUMNS[:width]
    show_table(
        ["role", "count", *columns], [_role(role)[: 2 + width] for role in report.roles], right=("count", *_RIGHT)
    )
    for one in report.schemes:
        lines.print(f"{one.size}, {one.values:,} weights: {one.text}")
    if tensors:
        lines.print()
        rows = [[*_tensor(one)[:width], printable(one.name)] for one in report.tensors]
        show_table(["shape", *columns[1:], "tensor"], rows, right=_RIGHT)
    if report.casts:
        lines.print("\nwhat a cast of the matrices would cost")
        columns = ("SQNR dB", "overflowing", "become zero", "largest error", "saved MB")
        show_table(["to", *columns, "hurt most"], [_cast(one) for one in report.casts], right=columns)
    for text in _remarks(report.tensors, None if tensors else LISTED):
        lines.print(text)


def _role(role: RoleReport) -> list[str]:
    stored = sorted(role.dtypes, key=lambda name: -role.dtypes[name])
    said = ", ".join(dict.fromkeys(_said(kind.partition(" ")[2]) for kind in role.verdict.kinds)) or "-"
    numbers = _numbers(role.statistics)
    return [
        role.role,
        str(role.tensors),
        f"{role.numel:,}",
        ", ".join(_SHORT.get(name, name) for name in stored),
        said,
        *numbers,
    ]


def _tensor(tensor: TensorReport) -> list[str]:
    shape = "x".join(str(size) for size in tensor.shape) or "scalar"
    said = tensor.layer.scheme if tensor.layer else _said(tensor.origin.key) if tensor.origin else "-"
    return [shape, _SHORT.get(tensor.dtype, tensor.dtype), said, *_numbers(tensor.statistics)]


def _said(origin: str) -> str:
    return "?" if origin == "unknown" else origin


def _numbers(found: Statistics | None) -> list[str]:
    if found is None or not found.nonzero:
        return ["-"] * 5
    low, high = found.lowest_exponent, found.highest_exponent
    span = f"{low}..{high}" if low != high else f"{low}"
    subnormal = percent(found.fp16_subnormal / found.nonzero)
    return [str(found.significant_bits), span, percent(found.exact["bf16"]), percent(found.exact["fp16"]), subnormal]


def _cast(found: WhatIf) -> list[str]:
    total, (name, worst) = found.total, found.worst[0]
    hurt = "-" if worst.harm is None else f"{printable(name)} ({worst.harm})"
    return [
        total.format,
        total.decibels,
        percent(total.overflowing / total.values),
        percent(total.zeroed / total.values),
        f"{total.largest_error:.3g}",
        f"{total.saved / 1e6:.1f}",
        hurt,
    ]


def written(result: Written) -> None:
    """Print what was written."""
    lines = Console(soft_wrap=True, highlight=False, markup=False)
    lines.print(f"wrote {printable(str(result.path))}: {result.cast} tensors cast, {result.copied} copied")
    if result.overflowing:
        lines.print(f"{result.overflowing:,} values were too large for the type", style="bold yellow")
    if result.zeroed:
        lines.print(f"{result.zeroed:,} values became zero")
    for remark in result.remarks:
        lines.print(printable(remark))


def _remarks(tensors: Sequence[TensorReport], most: int | None) -> Iterable[str]:
    """What stands out in single tensors: values that are not finite, that fp16 cannot hold, outliers, copies."""
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
