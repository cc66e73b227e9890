"""A bar chart of bytes by role, one bar for each recipe, against the memory of a device."""

from collections.abc import Mapping

from halfstep.accounting.account import Share
from halfstep.drawing import FAINT, INK, Figure, drawing


_GIB = 2**30
_COLOURS = {
    "weights": "#2f5d8a", "gradients": "#7aa6cf", "master": "#b5452f", "states": "#e0937d", "scales": "#f0cbbd",
    "communication": "#8a7aa8", "buffers": "#b9b0c9", "compute_copies": "#5c8f5a", "activations": "#a8cfa0",
}  # fmt: skip


def figure(title: str, shares: Mapping[str, Share], memory: int | None = None) -> Figure:
    """Stacked bars of the persistent bytes, compute copies and activations of each recipe, with a mark at the peak.

    Args:
        shares: the bytes by recipe name, in the order of the bars.
        memory: the bytes of a device's memory, drawn as a line.
    """
    with drawing(8.0, 1.5 + 0.36 * len(shares)) as drawn:
        axes = drawn.subplots()
        most = max(share.peak for share in shares.values()) / _GIB
        names, left = list(shares), [0.0] * len(shares)
        for role, colour in _COLOURS.items():
            widths = [getattr(share, role) / _GIB for share in shares.values()]
            if max(widths) > most / 500:
                axes.barh(names, widths, 0.7, left, color=colour, label=role.replace("_", " "))
                left = [start + width for start, width in zip(left, widths, strict=True)]
        axes.plot([share.peak / _GIB for share in shares.values()], names, "|", color=INK, markersize=13,
                  markeredgewidth=1.6, label="peak")  # fmt: skip
        if memory is not None:
            axes.axvline(memory / _GIB, color=FAINT, linewidth=1, linestyle="--", label="the device's memory")
        axes.invert_yaxis()
        axes.set_xlabel("GiB on one device")
        axes.set_title(title, loc="left", color=INK)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(ncols=1, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    return drawn
