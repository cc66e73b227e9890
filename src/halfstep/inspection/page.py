"""Renders a report as one HTML page without network access or scripts."""

import base64
import hashlib
import io
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from halfstep.errors import CheckpointError
from halfstep.inspection.report import Inspection, RoleReport, TensorReport
from halfstep.text import percent, printable


try:
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup
except ModuleNotFoundError as error:
    raise CheckpointError(
        f"the HTML page is written with {error.name}, which is not installed; install it with "
        "pip install 'halfstep[lab]', or ask for --json"
    ) from error

from halfstep.drawing import FAINT, INK, MaxNLocator, drawing


def to_html(report: Inspection) -> str:
    """The page. Every text of the checkpoint is escaped, and the page may load nothing and run no script."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"printable": printable, "percent": percent}
    style = _part("page.css")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    counted = any(role.statistics and role.statistics.nonzero for role in report.roles)
    return environment.from_string(_part("page.html")).render(
        report=report,
        style=Markup(style),
        policy=f"default-src 'none'; img-src data:; style-src 'sha256-{digest}'",
        outliers=_outliers(report),
        copies=[tensor for tensor in report.tensors if tensor.tied_to or tensor.duplicate_of],
        picture=base64.b64encode(png(report)).decode() if counted else None,
    )


def _outliers(report: Inspection) -> list[TensorReport]:
    """Tensors with outlier channels, the largest ratio first; tied ones once."""
    found = [(t.statistics.channels, t) for t in report.tensors if t.statistics is not None and t.tied_to is None]
    ratios = [(c.largest / c.median, tensor) for c, tensor in found if c is not None and c.outliers]
    return [tensor for _, tensor in sorted(ratios, key=lambda item: -item[0])]


def _part(name: str) -> str:
    return files("halfstep.inspection").joinpath(name).read_text(encoding="utf-8")


_BARS, _ZERO, _SUBNORMAL = "#4f83b6", "#f6d5cf", "#fdf0d2"
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_LOWEST, _HIGHEST = -60, 24  # exponents drawn; values beyond are drawn at the edge, with a note


def png(report: Inspection) -> bytes:
    """A PNG with a panel for each role with floating-point values: the share of values by binary exponent.

    Raises:
        CheckpointError: no role has values that were counted.
    """
    roles = [role for role in report.roles if role.statistics is not None and role.statistics.nonzero]
    if not roles:
        raise CheckpointError("nothing to draw: no floating-point values were counted (a quick look counts none)")
    buffer = io.BytesIO()
    with drawing(7.2, 0.6 + 1.25 * len(roles)) as drawn:
        low, high = _ends(roles)
        panels = drawn.subplots(len(roles), 1, sharex=True, squeeze=False)[:, 0]
        for axes, role in zip(panels, roles, strict=True):
            _draw(axes, role, low, high)
        panels[-1].set_xlabel("magnitude; red: fp16 makes it zero or infinite; yellow: subnormal in fp16")
        panels[-1].xaxis.set_major_locator(MaxNLocator(12, integer=True))
        panels[-1].xaxis.set_major_formatter(lambda value, _: "2" + str(int(value)).translate(_SUPERSCRIPT))
        drawn.canvas.print_png(buffer, metadata={"Software": None})  # type: ignore[attr-defined]  # it is Agg's
    return buffer.getvalue()


def _ends(roles: Sequence[RoleReport]) -> tuple[int, int]:
    found = [role.statistics for role in roles if role.statistics is not None]
    low = min(min(one.lowest_exponent for one in found), -26)
    return max(low, _LOWEST), min(max(max(one.highest_exponent for one in found) + 1, 2), _HIGHEST)


def _draw(axes: Any, role: RoleReport, low: int, high: int) -> None:
    found = role.statistics
    assert found is not None
    shares = dict.fromkeys(range(low, high), 0.0)
    for place, count in enumerate(found.exponents, found.lowest_exponent):
        shares[min(max(place, low), high - 1)] += count / found.nonzero
    axes.axvspan(low, max(low, -25), color=_ZERO, linewidth=0, zorder=0)
    axes.axvspan(max(low, -25), -14, color=_SUBNORMAL, linewidth=0, zorder=0)
    if high > 16:
        axes.axvspan(16, high, color=_ZERO, linewidth=0, zorder=0)
    drawn = {place: 100 * share for place, share in shares.items() if share}
    axes.bar(
        list(drawn),
        list(drawn.values()),
        width=1,
        align="edge",
        color=_BARS,
        edgecolor="white",
        linewidth=0.4,
        zorder=3,
    )
    beyond = sum(n for e, n in enumerate(found.exponents, found.lowest_exponent) if e < low or e >= high)
    more = f"; {percent(beyond / found.nonzero)} beyond, at the edge" if beyond else ""
    axes.set_title(f"{role.role}: {role.numel:,} values{more}", loc="left", fontsize=9, fontweight="bold", color=INK)
    subnormal = percent(found.fp16_subnormal / found.nonzero)
    lost = percent((found.fp16_below + found.fp16_above) / found.nonzero)
    axes.set_title(f"fp16: {subnormal} subnormal, {lost} out of range", loc="right", fontsize=8.5, color=FAINT)
    axes.set(xlim=(low, high), ylabel="%")
    axes.spines[["top", "right"]].set_visible(False)
