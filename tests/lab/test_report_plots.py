"""The data of the report's plots, and that the drawn figures show it."""

import math
import statistics
from dataclasses import replace
from itertools import pairwise

import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle
from run_folder import BYTES, USUAL, Run, rows, statistics_row, uniform, usual_experiment, write, write_run

from halfstep import formats
from halfstep.lab.experiment import Experiment, RunFolder
from halfstep.lab.report import PICTURES, curves, exponents, lost, rows as bars
from halfstep.lab.report.results import load, looks, percent_ticks, plain, power, share, signed, spread


@pytest.fixture(scope="module")
def usual(tmp_path_factory):
    return load(write(tmp_path_factory.mktemp("runs") / "usual"))


def experiment_with(tmp_path, gradients, run_scale=1.0, last_scale=None):
    """fp32 runs with these activation gradients in the last statistics, and fp16-mixed with this last loss scale."""
    experiment = Experiment(recipes=("fp32", "fp16-mixed"), steps=4, statistics=1)
    folder = RunFolder.create(tmp_path / "run", experiment, "", {})
    content = [r for r in rows(experiment, "fp32", 0, Run(statistics=False)) if r["kind"] != "end"]
    write_run(folder, "fp32", 0, [*content, statistics_row(4, run_scale, 1.0, gradients)])
    if last_scale:
        write_run(folder, "fp16-mixed", 0, rows(experiment, "fp16-mixed", 0, Run(scale=last_scale, statistics=False)))
    return load(folder)


UNIFORM = {1: 1 / 3, 8: 2 / 15, 2**10: 0.0}  # zero in fp16 of g = 2^U(-30, -15): 5, 2, 0 of 15 octaves


@pytest.mark.quick("8")
@pytest.mark.parametrize("scale", UNIFORM)
def test_zeroed_share_equals_the_bars_left_of_the_line(scale, tmp_path):
    results = experiment_with(tmp_path, uniform(-30, -15), last_scale=float(scale))
    data = exponents.gradient_exponents(results)
    assert (2**data.shift, data.shift_from) == (scale, "fp16-mixed's last loss scale")
    cast = exponents.cast_to(data.values["activation_gradients"], formats.get("fp16"), data.shift)
    assert cast.zeroed == pytest.approx(UNIFORM[scale], abs=1e-12)
    for panel, expected in zip(exponents.draw_exponents(data, None, "t").axes, (1 / 3, UNIFORM[scale]), strict=True):
        bars = [p for p in panel.patches if isinstance(p, Rectangle) and to_hex(p.get_facecolor()) == exponents._BARS]
        assert sum(bar.get_height() for bar in bars) == pytest.approx(1.0)
        drawn = sum(bar.get_height() for bar in bars if bar.get_x() + bar.get_width() <= -25)
        assert drawn == pytest.approx(expected, abs=1e-12)
        assert share(expected) in [text.get_text() for text in panel.texts]


def test_gradient_exponents_are_unscaled(tmp_path):
    """Stored gradients of a scaled run are divided by its loss scale."""
    data = exponents.gradient_exponents(experiment_with(tmp_path, uniform(-20, -5), run_scale=2.0**10))
    assert sorted(data.values["activation_gradients"].counts) == list(range(-30, -15))
    assert (data.shift, data.shift_from) == (16, "the usual first loss scale")


def test_exact_zeros_are_stated(tmp_path):
    picture = exponents.exponents_picture(experiment_with(tmp_path, uniform(-30, -15)))
    assert "7 activation gradients that are exactly zero (<0.1%)" in picture.finding
    assert "7 (<0.1%)" in picture.figure.axes[0].get_title(loc="right")


def test_overflow_has_its_own_region(tmp_path):
    data = exponents.gradient_exponents(experiment_with(tmp_path, uniform(-4, 6), last_scale=2.0**12))
    texts = [text.get_text() for text in exponents.draw_exponents(data, None, "t").axes[1].texts]
    assert "overflows" in texts
    assert "20.0%" in texts  # 2^16 and 2^17 of ten octaves


def test_gradient_exponents_are_fp32s_in_any_order_of_recipes(tmp_path):
    folder = write(tmp_path / "run", USUAL, usual_experiment(["bf16-mixed", "fp32"], steps=20))
    data = exponents.gradient_exponents(load(folder))
    assert (data.recipe, data.seed, data.step) == ("fp32", 0, 20)


def test_loss_curves_hold_the_first_seed_and_fp32_bands(usual):
    data = curves.loss_curves(usual)
    assert [c.recipe for c in data.curves] == list(USUAL)
    fp32 = usual.runs["fp32"]
    for step, band in data.bands.items():
        at_step = [r["loss"] for seed in fp32 for r in fp32[seed] if r["kind"] == "validation" and r["step"] == step]
        assert [losses[step] for losses in data.fp32.values()] == at_step
        assert band.mean == pytest.approx(sum(at_step) / 3)
    nomaster = next(c for c in data.curves if c.recipe == "bf16-nomaster")
    steps, distances = data.gaps(nomaster)
    own, fp32s = (usual.runs[recipe][0][-2]["loss"] for recipe in ("bf16-nomaster", "fp32"))
    assert (steps[-1], distances[-1]) == (500, pytest.approx(own / fp32s - 1))


def test_diverged_curve_ends_at_the_divergence(usual):
    curve = next(c for c in curves.loss_curves(usual).curves if c.recipe == "fp16-pure")
    last = [r["loss"] for r in usual.runs["fp16-pure"][0] if r["kind"] == "step"][-1]
    assert curve.end == (2, last)
    figure = curves.loss_picture(usual).figure
    crosses = [line for line in figure.axes[0].lines if line.get_marker() == "X"]
    assert [(line.get_xdata()[0], line.get_ydata()[0]) for line in crosses] == [(2, last)]
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["fp32's band over its seeds", "fp16-pure diverged at step 2"]


def test_exploding_loss_does_not_stretch_the_axis(tmp_path):
    runs = {"fp32": Run(), "fp16-pure": Run(excess=50.0, diverges=90)}
    figure = curves.loss_picture(load(write(tmp_path / "run", runs, usual_experiment(runs, steps=100)))).figure
    low, top = figure.axes[0].get_ylim()
    assert 1 < low < 2
    assert 5.5 < top < 7
    (cross,) = [line for line in figure.axes[0].lines if line.get_marker() == "X"]
    assert (cross.get_xdata()[0], cross.get_ydata()[0]) == (90, top)


def test_plotted_gaps_equal_the_verdicts(usual):
    data = bars.final_gaps(usual)
    assert data.margin == 0.01
    found = {gap.recipe: gap for gap in data.gaps}
    assert list(found) == [recipe for recipe in USUAL if recipe != "fp32"]
    assert found["fp16-pure"] == bars.Gap("fp16-pure", None, None, "diverged at step 2")
    for verdict in usual.verdicts[1:-1]:
        assert (found[verdict.recipe].gap, found[verdict.recipe].interval) == (verdict.paired_gap, verdict.interval)


def test_speeds_are_medians_with_their_ratio(usual):
    data = {s.recipe: s for s in bars.speeds(usual)}
    assert data["fp32"].ratio == 1
    assert data["bf16-nomaster"].ratio == data["bf16-nomaster"].median / data["fp32"].median
    assert all(s.low <= s.median <= s.high for s in data.values())
    assert [r for r, s in data.items() if not s.certain] == ["fp16-pure"]  # one step is not enough
    assert "bf16-nomaster" in bars.speed_picture(usual).alt


def test_plotted_bytes_equal_the_memory_rows(usual):
    found = bars.bytes_by_role(usual)
    assert list(found) == list(USUAL)
    for recipe, sizes in found.items():
        assert tuple(sizes.values()) == BYTES[recipe]
        assert bars.total_bytes(sizes) == sum(BYTES[recipe][:-1])


def test_loss_scale_history_marks_skipped_steps(usual):
    (history,) = exponents.histories(usual)
    assert (history.recipe, history.skipped) == ("fp16-mixed", USUAL["fp16-mixed"].overflows)
    assert (max(history.exponents), history.exponents[-1], len(history.steps)) == (20, 17, 500)
    picture = exponents.scale_picture(usual)
    assert picture.alt == f"The loss scale ends at {power(17)}; 5 steps were skipped; seed 0"  # the table has all seeds
    (axes,) = picture.figure.axes
    crosses = next(line for line in axes.lines if line.get_marker() == "X")
    assert list(zip(crosses.get_xdata(), crosses.get_ydata(), strict=True))[:3] == [(1, 20), (2, 19), (3, 18)]


def test_loss_scale_of_1_has_no_history(tmp_path):
    runs = {"fp32": Run(), "bf16-pure": Run(scale=1.0), "fp16-master": replace(USUAL["fp16-mixed"], scale=1024.0)}
    results = load(write(tmp_path / "run", runs, usual_experiment(runs, steps=20)))
    assert [h.recipe for h in exponents.histories(results)] == ["fp16-master"]


def test_lost_shares_equal_the_statistics_rows(usual):
    data = lost.shares_lost(usual)
    assert (data.recipe, data.steps) == ("fp32", (100, 200, 300, 400, 500))
    assert data.formats("updates") == ["fp16", "bf16", "float8_e4m3fn", "float8_e5m2"]
    middle = [r for r in usual.runs["fp32"][0] if r["kind"] == "statistics"][2]  # shares change monotonically
    for name in data.formats("updates"):
        assert data.median("updates", name) == middle["lost"][name]
        assert data.median("gradients", name) == middle["zeroed"]["gradients"][name]
        assert data.median("weights", name) == middle["zeroed"]["weights"][name]


def test_descent_equals_the_statistics_rows(usual):
    data = {d.recipe: d for d in lost.descents(usual)}
    looked = [r for r in usual.runs["fp32"][0] if r["kind"] == "statistics"]
    assert data["fp32"].steps == (100, 200, 300, 400, 500)
    assert data["fp32"].quality == [r["descent"]["quality"] for r in looked]
    assert data["fp32"].lost == [r["descent"]["lost_share"] for r in looked]
    assert data["fp32"].worst_layer == "token.weight"
    picture = lost.descent_picture(usual)
    least = min(data.values(), key=lambda d: d.medians[0])
    assert f"{100 * statistics.median(least.quality):.1f}% of {least.recipe}'s update arrives" in picture.alt
    assert "token.weight" in picture.finding


def test_runs_without_statistics_have_no_descent(tmp_path):
    results = load(write(tmp_path / "run", {"fp32": Run(statistics=False)}, Experiment(recipes=("fp32",), steps=20)))
    assert lost.descents(results) == []
    assert lost.descent_picture(results).figure is None


def test_unseen_updates_are_omitted(tmp_path):
    """For 16-bit weights that take updates directly, `lost` is empty."""
    blind = Run(sees_updates=False)
    alone = load(write(tmp_path / "alone", {"bf16-pure": blind}, Experiment(recipes=("bf16-pure",), steps=20)))
    picture = lost.zeroed_picture(alone)
    assert set(lost.shares_lost(alone).shares) == {"weights", "gradients"}
    assert len(picture.figure.axes) == 2
    assert "not seen" in picture.finding
    runs = {"bf16-pure": blind, "bf16-mixed": Run()}
    both = load(write(tmp_path / "both", runs, Experiment(recipes=tuple(runs), steps=20)))
    assert lost.shares_lost(both).recipe == "bf16-mixed"


@pytest.mark.quick("draw_loss", "gap_picture", "draw_speed", "draw_scale", "draw_zeroed", "draw_descent")
@pytest.mark.parametrize("make", PICTURES, ids=lambda make: getattr(make, "draw", make).__name__)
def test_texts_are_inside_the_figure_and_do_not_overlap(make, usual):
    """Every text lies within the figure, and no labels of an axes overlap."""
    figure = make(usual).figure
    figure.draw_without_rendering()
    whole = figure.bbox
    for axes in figure.axes:
        boxes = [text.get_window_extent() for text in axes.texts if text.get_text()]
        for box in boxes:
            assert whole.x0 <= box.x0
            assert box.x1 <= whole.x1 + 1
        shrunk = [box.shrunk(0.94, 0.7) for box in boxes]
        for i, box in enumerate(shrunk):
            assert not any(box.overlaps(other) for other in shrunk[:i])


def test_recipes_have_distinct_fixed_looks():
    table = looks(["a", "fp32", *"bcdefghi"])
    assert table["fp32"].colour == "black"
    assert len({look.colour for look in table.values()}) == len({look.marker for look in table.values()} | {0}) == 10
    many = looks([str(i) for i in range(18)])
    assert len(set(many.values())) == 19


@pytest.mark.parametrize(
    ("places", "gap"),
    [([0.1, 0.1, 0.1], 0.2), ([0.0, 1.0, 1.0], 0.3), ([0.9, 0.2, 0.91, 0.5], 0.1), ([3.0, -1.0], 0.5)],
)
def test_spread_keeps_order_and_distance(places, gap):
    moved = spread(places, gap)
    assert all(-1e-9 <= y <= 1 + 1e-9 for y in moved)
    order = sorted(range(len(places)), key=lambda i: places[i])
    assert all(moved[b] - moved[a] >= gap - 1e-9 for a, b in pairwise(order))


def test_spread_of_too_many_uses_the_whole_height():
    assert spread([0.5] * 5, 0.5) == pytest.approx([0, 0.25, 0.5, 0.75, 1])
    assert spread([], 0.1) == []


def test_number_formatting():
    assert [share(x) for x in (0.0, 1e-9, 0.5, 1 - 1e-9, 1.0)] == ["0%", "<0.1%", "50.0%", ">99.9%", "100%"]
    assert [signed(x) for x in (0.01, -0.01, -1e-9)] == ["+1.00%", "−1.00%", "0.00%"]
    assert power(-149) == "2⁻¹⁴⁹"
    assert plain("a\nb\u4e2d\x00") == "a?b??"
    assert len(plain("x" * 100)) == 30
    ticks = percent_ticks(-0.02, 0.3, 0.01)
    assert ticks == sorted(ticks)
    assert 0.0 in ticks
    assert math.isclose(max(ticks), 0.2)
    assert percent_ticks(-1.7, 2.9, 0.02, most=3) == pytest.approx([-0.5, -0.02, 0, 0.02, 0.5])
