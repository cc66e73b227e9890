"""What `halfstep inspect` prints: the verdict, what contradicts it, and a line a role or a tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from halfstep.bits.sentences import percent
from halfstep.bits.statistics import Statistics
from halfstep.bits.what_if import WhatIf
from halfstep.cli.terminal import alarm, table_text
from halfstep.inspection import Inspection, RoleReport, TensorReport
from halfstep.inspection.report import LISTED
from halfstep.inspection.write import Written
from halfstep.printable import printable


_COLUMNS = ("values", "stored", "bits say", "bits", "log2", "exact bf16", "exact fp16", "fp16 subn.")
_RIGHT = ("values", "bits", "log2", "exact bf16", "exact fp16", "fp16 subn.")
_COSTS = ("to", "SQNR dB", "overflowing", "become zero", "largest error", "saved MB", "hurt most")
_UNCOUNTED = 3  # the columns of a quick look
_SHORT = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}  # for tables of 80 columns


def text_of(report: Inspection, tensors: bool, result: Written | None) -> str:
    """A report, with `tensors` a line for each of them; and what was written, where something was."""
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


def _written(result: Written) -> Iterator[str]:
    yield f"wrote {printable(str(result.path))}: {result.cast} tensors cast, {result.copied} copied"
    if result.overflowing:
        yield alarm(f"{result.overflowing:,} values were too large for the type")
    if result.zeroed:
        yield f"{result.zeroed:,} values became zero"
    yield from map(printable, result.remarks)


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
