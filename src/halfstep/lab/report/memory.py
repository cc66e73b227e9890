"""Plot 4: the bytes that one parameter costs, by what they hold."""

from collections.abc import Mapping
from dataclasses import dataclass

from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from halfstep.lab.report.results import BASELINE, FAINT, INK, ROLES, Plot, Results, name_rows, new_axes, plain


PERSISTENT = {"weights": "weights", "grads": "gradients", "master": "master copy", "states": "optimizer states"}
"""The roles whose bytes last from step to step, as `metrics.jsonl` names them and as a reader does."""

_COLOURS = {"weights": "weights", "grads": "gradients", "master": "master", "states": "states"}


@dataclass(frozen=True)
class Bytes:
    """One recipe's bytes a parameter: by lasting role, and of the copies that live in a pass only."""

    recipe: str
    roles: Mapping[str, float]
    transient: float

    @property
    def total(self) -> float:
        """The lasting bytes."""
        return sum(self.roles.values())


def total_bytes(by_role: Mapping[str, float]) -> float:
    """The lasting bytes a parameter of a `memory` row."""
    return sum(by_role.get(role, 0.0) for role in PERSISTENT)


def bytes_by_role(results: Results) -> list[Bytes]:
    """The data of the plot."""
    return [
        Bytes(v.recipe, {role: b.get(role, 0.0) for role in PERSISTENT}, b.get("transient", 0.0))
        for v in results.verdicts
        if (b := v.bytes_per_parameter) is not None
    ]


def _title(data: list[Bytes], results: Results) -> str:
    least, most = min(data, key=lambda b: b.total), max(data, key=lambda b: b.total)
    if least.total == most.total:
        return f"{plain(most.recipe) if len(data) == 1 else 'Every recipe'} keeps {_size(most.total)} a parameter"
    return f"From {_size(least.total)} a parameter ({plain(least.recipe)}) to {most.total:.3g} ({plain(most.recipe)})"


def _finding(data: list[Bytes], results: Results) -> str:
    base = next((b for b in data if b.recipe == BASELINE), None)
    below = [b for b in data if base and b.total < base.total]
    if base and below:
        saved = ", ".join(f"{b.recipe} {1 - b.total / base.total:.0%}" for b in below)
        return f"Against fp32's {_size(base.total)} a parameter, these save: {saved}."
    if base and len(data) > 1:
        return f"None keeps less than fp32's {_size(base.total)} a parameter."
    return "; ".join(f"{b.recipe}: {_size(b.total)} a parameter" for b in data) + "."


def _size(value: float) -> str:
    return f"{value:.3g} bytes"


def draw(data: list[Bytes], results: Results, title: str) -> Figure:
    """A stack a recipe, with its numbers; transient copies to the right of it."""
    figure, axes = new_axes(1.75 + 0.36 * len(data), title)
    widest = max(b.total for b in data)
    apart = 0.105 * widest  # room for the total between the stack and the hatched bar
    for row, b in enumerate(data):
        left = 0.0
        for role in PERSISTENT:
            size = b.roles[role]
            if size <= 0:
                continue
            axes.barh(row, size, left=left, height=0.62, color=ROLES[_COLOURS[role]], edgecolor="white", linewidth=0.8)
            if size > 0.05 * widest:
                ink = "white" if role in ("weights", "grads") else INK
                axes.text(left + size / 2, row, f"{size:.3g}", ha="center", va="center_baseline", fontsize=9, color=ink)
            left += size
        axes.text(left + 0.012 * widest, row, f"{b.total:.3g}", va="center_baseline", fontsize=10, fontweight="bold")
        if b.transient > 0:
            axes.barh(row, b.transient, left=left + apart, height=0.62, color="white", edgecolor=FAINT, hatch="////")
            x = left + apart + b.transient + 0.012 * widest
            axes.text(x, row, f"+{b.transient:.3g}", va="center_baseline", fontsize=9, color=FAINT)
    name_rows(axes, [plain(b.recipe) for b in data], 0.55)
    longest = max(b.total + apart + b.transient for b in data)
    axes.set(xlim=(0, longest + 0.09 * widest), xlabel="bytes a parameter")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 4, 10]))

    def used(role: str) -> bool:
        return any(b.roles[role] for b in data)

    handles = [Patch(color=ROLES[_COLOURS[role]], label=name) for role, name in PERSISTENT.items() if used(role)]
    if any(b.transient for b in data):
        handles.append(Patch(facecolor="white", edgecolor=FAINT, hatch="////", label="copies in a pass"))
    figure.legend(
        handles=handles, loc="outside lower center", ncols=len(handles), fontsize=9, columnspacing=1.2,
        handlelength=1.3, handletextpad=0.5,
    )  # fmt: skip
    return figure


picture = Plot(
    "memory",
    "Memory of a parameter",
    "What lasts from step to step is solid; copies that autocast makes inside a pass are hatched and stand apart. "
    "Activations are not in it.",
    "Not drawn: no run has measured its memory yet.",
    bytes_by_role,
    _title,
    _finding,
    draw,
)
