"""The contents of a run folder, read once and judged; the common look of plots: size, fonts, colours, texts."""

import io
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from halfstep.lab.experiment import Experiment, Facts, Row, RunFolder, read_json
from halfstep.lab.verdict import (
    DEGRADES,
    DIVERGED,
    MATCHES,
    UNDECIDED,
    Band,
    RecipeVerdict,
    band,
    final_values,
    judge,
    rule,
)


BASELINE = "fp32"


@dataclass(frozen=True)
class Results:
    """The rows of every run that has begun, and the verdict on every recipe, in the experiment's order."""

    folder: RunFolder
    experiment: Experiment
    facts: Facts
    environment: Mapping[str, Any]
    runs: Mapping[str, Mapping[int, Sequence[Row]]]
    band: Band | None
    verdicts: tuple[RecipeVerdict, ...]

    @property
    def name(self) -> str:
        """The experiment's name, which is its folder's."""
        return self.folder.path.resolve().name

    @property
    def baseline(self) -> RecipeVerdict | None:
        """The verdict on fp32, None if it does not take part."""
        return next((v for v in self.verdicts if v.recipe == BASELINE), None)

    @property
    def learning_rates(self) -> dict[str, float]:
        """The peak learning rate by recipe; empty if all have the same."""
        own, usual = self.experiment.recipe_lr, self.experiment.lr
        return {v.recipe: own.get(v.recipe, usual) for v in self.verdicts} if own else {}

    def with_status(self, status: str) -> list[str]:
        """The recipes with that verdict, fp32 left out."""
        return [v.recipe for v in self.verdicts if v.status == status and v.recipe != BASELINE]

    def first_seed(self, recipe: str) -> tuple[int, Sequence[Row]] | None:
        """The lowest seed of a recipe that has begun, and its rows."""
        seeds = self.runs.get(recipe, {})
        return min(seeds.items(), key=lambda item: item[0]) if seeds else None

    def slowdown(self, verdict: RecipeVerdict) -> float | None:
        """A recipe's time per step over fp32's."""
        base = self.baseline and self.baseline.ms_per_step
        return verdict.ms_per_step / base if base and verdict.ms_per_step is not None else None

    def headline(self) -> str:
        """The result in one or two sentences."""
        others = [v for v in self.verdicts if v.recipe != BASELINE]
        if self.baseline is None:
            return "fp32 took no part, so the recipes are shown as they are, without a verdict against it."
        parts = [f"{len(self.with_status(MATCHES))} of {len(others)} recipes match fp32"] if others else []
        parts += [
            f"{v.recipe} degrades by {v.paired_gap:.1%}"
            for v in others
            if v.status == DEGRADES and v.paired_gap is not None
        ]
        if open_ones := self.with_status(UNDECIDED):
            parts.append(f"these seeds cannot tell of {', '.join(open_ones)}")
        parts += [f"{v.recipe} diverged at step {v.diverged_at}" for v in self.verdicts if v.status == DIVERGED]
        return "; ".join(parts or ["only fp32 was trained"]) + "."

    def summary(self) -> dict[str, Any]:
        """The data of summary.json."""
        return {
            "experiment": self.name,
            **({"learning_rates": self.learning_rates} if self.learning_rates else {}),
            "rule": rule(self.facts.metric, self.experiment.margin),
            "margin": self.experiment.margin,
            "metric": asdict(self.facts.metric) if self.facts.metric else None,
            "band": asdict(self.band) if self.band else None,
            "verdicts": [verdict.to_dict() for verdict in self.verdicts],
        }


def load(folder: RunFolder) -> Results:
    """Read a run folder and judge its recipes; runs that have not begun are left out.

    Raises:
        RunError: a file is damaged or was edited.
    """
    experiment, facts = folder.experiment(), folder.facts()
    runs: dict[str, dict[int, list[Row]]] = {recipe: {} for recipe in experiment.recipes}
    planned = experiment.runs()
    if BASELINE not in runs:  # fp32's runs of an earlier experiment may have been copied in
        planned += [(BASELINE, seed) for seed in experiment.baselines()]
        if any(folder.metrics(*run) for run in planned if run[0] == BASELINE):
            runs = {BASELINE: {}, **runs}
    for recipe, seed in planned:
        if rows := folder.metrics(recipe, seed):
            runs[recipe][seed] = rows
    fp32 = runs.get(BASELINE, {})
    return Results(
        folder=folder,
        experiment=experiment,
        facts=facts,
        environment=read_json(folder.environment_file) if folder.environment_file.is_file() else {},
        runs=runs,
        band=band(list(final_values(fp32, facts.metric).values())),
        verdicts=tuple(judge(recipe, seeds, fp32, facts.metric, experiment.margin) for recipe, seeds in runs.items()),
    )


INK, FAINT, BAND = "#1d2228", "#6b737c", "#d9dde2"
ROLES = {"weights": "#1f3b5c", "gradients": "#4f83b6", "master": "#9fc3e3", "states": "#dbe6f0", "updates": "#c8663c"}

SETTINGS: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.usetex": False,
    "text.parse_math": False,  # a dollar in a recipe's name is a dollar
    "text.color": INK,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "axes.facecolor": "white",
    "axes.unicode_minus": True,
    "figure.facecolor": "white",
    "hatch.linewidth": 0.8,
    "hatch.color": FAINT,
    "legend.frameon": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": "#e6e9ec",
    "grid.linewidth": 0.8,
}
"""Settings for `matplotlib.rc_context`, so that a user's own settings do not change a report."""

PERCENT = FuncFormatter(lambda value, _: f"{100 * value:+g}".replace("-", "−") if value else "0")
"""Tick labels of an axis of relative differences whose label says percent."""

_WIDTH, _DPI = 6.4, 200  # inches; twice the 100 dpi of a plain screen
# Okabe and Ito 2008 without its yellow, then three of Paul Tol's muted set: distinct with every kind of colour vision.
_PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#882255", "#999933", "#332288")
_MARKERS = ("o", "s", "^", "D", "v", "P", "<", ">", "h")
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Look:
    """How a recipe is drawn in every plot."""

    colour: str
    marker: str
    line: str


@dataclass(frozen=True)
class Picture:
    """A plot with its text; without a figure, `finding` says why there is none."""

    name: str
    heading: str
    look_for: str
    finding: str
    figure: Figure | None = None
    alt: str = ""


@dataclass(frozen=True)
class Plot:
    """A kind of plot: called with a run folder's results, returns a picture, or the reason why there is none."""

    name: str
    heading: str
    look_for: str
    missing: str
    """The text if there are no data."""
    data: Callable[[Results], Any]
    title: Callable[[Any, Results], str]
    finding: Callable[[Any, Results], str]
    draw: Callable[[Any, Results, str], Figure]

    def __call__(self, results: Results) -> Picture:
        """The picture of some results."""
        if not (data := self.data(results)):
            return Picture(self.name, self.heading, self.look_for, self.missing)
        title, finding = self.title(data, results), self.finding(data, results)
        return Picture(self.name, self.heading, self.look_for, finding, self.draw(data, results, title), title)


def looks(recipes: Iterable[str]) -> dict[str, Look]:
    """A look for each recipe: fp32 black, the others by their index; dashed when the colours repeat."""
    others = [recipe for recipe in recipes if recipe != BASELINE]
    places = [divmod(i, len(_PALETTE)) for i in range(len(others))]
    given = [Look(_PALETTE[place], _MARKERS[place], "--" if lap % 2 else "-") for lap, place in places]
    return {BASELINE: Look("black", "o", "-"), **dict(zip(others, given, strict=True))}


def new_figure(height: float, title: str) -> Figure:
    """A figure of the common width, `height` inches high, its title over its whole width."""
    figure = Figure(figsize=(_WIDTH, height), dpi=_DPI, layout="constrained")
    figure.suptitle(textwrap.fill(title, 66), x=0.012, ha="left", fontsize=11, fontweight="bold", linespacing=1.25)
    return figure


def new_axes(height: float, title: str, grid: Literal["x", "y"] | None = None) -> tuple[Figure, Axes]:
    """A `new_figure` and its only panel, with grid lines along an axis."""
    figure = new_figure(height, title)
    axes = figure.subplots()
    if grid is not None:
        axes.grid(axis=grid)
    return figure, axes


def whisker(axes: Axes, row: int, low: float, high: float, halo: float) -> None:
    """Draw a range over the bar of a row, with `halo` points of white around it."""
    for colour, linewidth, zorder in (("white", halo, 3), (INK, 1.6, 4)):
        axes.plot([low, high], [row, row], color=colour, linewidth=linewidth, zorder=zorder)


def name_rows(axes: Axes, names: Sequence[str], room: float, **type: Any) -> None:
    """Name the rows of a plot, the first on top, with `room` above and below them."""
    axes.set_yticks(range(len(names)), names, **type)
    axes.set_ylim(len(names) - 1 + room, -room)
    axes.tick_params(axis="y", length=0)


def png(figure: Figure) -> bytes:
    """The figure as PNG, the same bytes for the same data."""
    layout = figure.get_layout_engine()
    if layout is not None:  # run the layout once: savefig would repeat it in each of its two passes
        layout.execute(figure)
        figure.set_layout_engine("none")
    buffer = io.BytesIO()
    FigureCanvasAgg(figure).print_png(buffer, metadata={"Software": None})  # type: ignore[no-untyped-call]
    return buffer.getvalue()


def plain(text: str, limit: int = 30) -> str:
    """A string from a file made safe for a figure: short, without control characters or glyphs the font lacks."""
    shown = "".join(c if c.isprintable() and ord(c) < 0x250 else "?" for c in text)
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def share(value: float) -> str:
    """A share in percent; a share that is not 0 or 1 is never shown as none or all.

    >>> share(0.0004), share(0.1234), share(0.0)
    ('<0.1%', '12.3%', '0%')
    """
    if value in (0.0, 1.0):
        return f"{value:.0%}"
    if value < 0.0005:
        return "<0.1%"
    return ">99.9%" if value > 0.9995 else f"{value:.1%}"


def signed(value: float) -> str:
    """A difference in percent, with its sign.

    >>> signed(0.0312), signed(-0.0004), signed(-0.00004)
    ('+3.12%', '−0.04%', '0.00%')
    """
    text = f"{value:+.2%}"
    return "0.00%" if text.strip("+-") == "0.00%" else text.replace("-", "−")


def unit(name: str) -> str:
    """A unit as it follows a number.

    >>> unit("nats"), unit("")
    (' nats', '')
    """
    return f" {name}" if name else ""


def times(ratio: float) -> str:
    """A ratio with about three digits.

    >>> times(0.4768), times(17.2)
    ('0.48', '17')
    """
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}"


def power(exponent: int) -> str:
    """A power of two with a superscript exponent.

    >>> power(-25)
    '2⁻²⁵'
    """
    return "2" + str(exponent).translate(_SUPERSCRIPT)


def percent_ticks(low: float, high: float, linear: float, most: int = 5) -> list[float]:
    """Ticks at 1, 2 and 5 times powers of ten, for an axis of shares that is logarithmic beyond ±`linear`.

    Args:
        most: the largest number of ticks above zero.
    """
    steps = [m * 10.0**e for e in range(-3, 3) for m in (1, 2, 5)]
    sizes = [s for s in steps if s >= 0.99 * linear]
    while len([s for s in sizes if s <= high]) > most:
        sizes = sizes[::2]
    return [-s for s in reversed(sizes) if -s >= low] + [0.0] + [s for s in sizes if s <= high]


def spread(places: Sequence[float], gap: float) -> list[float]:
    """Positions in [0, 1] moved apart to at least `gap`, in the same order, as little as one pass can.

    >>> spread([0.5, 0.5], 0.25)
    [0.375, 0.625]
    """
    gap = min(gap, 1 / max(1, len(places) - 1))
    order = sorted(range(len(places)), key=lambda i: places[i])
    clusters: list[tuple[float, list[int]]] = []  # (centre, members), merged while they overlap
    for i in order:
        centre, members = min(max(places[i], 0.0), 1.0), [i]
        while clusters and clusters[-1][0] + gap * (len(clusters[-1][1]) + len(members)) / 2 > centre:
            before, earlier = clusters.pop()
            centre = (before * len(earlier) + centre * len(members)) / (len(earlier) + len(members))
            members = earlier + members
            half = gap * (len(members) - 1) / 2
            centre = min(max(centre, half), 1 - half)
        clusters.append((centre, members))
    result = [0.0] * len(places)
    for centre, members in clusters:
        for j, i in enumerate(members):
            result[i] = centre + gap * (j - (len(members) - 1) / 2)
    return result
