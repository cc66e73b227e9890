"""The bars: the figures that rows are expected to reach on an H100 or an H200, and verdicts on them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


SECTIONS = {
    "cast": "casts", "codes": "casts", "amax": "casts", "tensor scale": "casts", "two layouts": "casts",
    "norm": "casts", "adamw": "optimizers", "host": "optimizers", "product": "products", "linear": "products",
    "step": "training", "graphed": "training", "graphed step": "training", "host of a layer": "products",
}  # fmt: skip
"""The section of each kind of row."""
ELEMENTS, PARAMETERS, SQUARE, LAYER, STEP = "2^30", "2^30", "8192^3", "16384 x 8192 x 8192", "1B, 16384 tokens"
HOST = "8 layers of 256 x 1024 x 1024"
"""Shapes belong to bars: a figure at another shape is printed, but not judged."""


@dataclass(frozen=True)
class Bar:
    """The expected value of one measure of one row."""

    row: str
    measure: str
    at: str
    """`>=` or `<=`."""
    h100: float
    h200: float
    shape: str
    note: str = ""
    """The kernel's instructions per element, for bars relative to a copy: a reason why they may be missed."""

    def on(self, device: str) -> float | None:
        """The expected value on that device; None for devices without bars."""
        return self.h200 if "H200" in device else self.h100 if "H100" in device else None


@dataclass(frozen=True)
class Verdict:
    """A bar with the measured value and a word: missed, not measured, not judged, met."""

    bar: Bar
    word: str
    value: float | None = None
    why: str = ""


def _copy(row: str, h100: float, h200: float | None = None, note: str = "", shape: str = ELEMENTS) -> Bar:
    return Bar(row, "of copy", ">=", h100, h100 if h200 is None else h200, shape, note)


def _peer(row: str, peer: str, most: float, shape: str = ELEMENTS) -> Bar:
    return Bar(row, f"to {peer}", "<=", most, most, shape)


def _least(row: str, measure: str, least: float, shape: str) -> Bar:
    return Bar(row, measure, ">=", least, least, shape)


BARS = (
    _copy("cast: float32 to float32, nearest", 0.95, note="16"),
    _peer("cast: float32 to float32, nearest", "torch's float8 and back", 0.5),
    _copy("cast: bf16 to bf16, nearest", 0.90, note="17.5"),
    _copy("cast: float32, stochastic", 0.85, note="34"),
    _peer("cast: float32, stochastic", "torchao's bf16 stochastic rounding, compiled", 1.0),
    _copy("cast: bf16, stochastic", 0.70, 0.55, "36"),
    _copy("codes: bf16 to E4M3", 0.90, note="5.5 by cvt"),
    _peer("codes: bf16 to E4M3", "torch's to(float8_e4m3fn)", 1.05),
    _copy("codes: bf16 to E4M3, by integers", 0.70, 0.55, "20"),
    _copy("amax: bf16", 0.90, note="about 3"),
    _peer("amax: bf16", "torch's amax of abs", 0.7),
    _peer("amax: bf16", "torch's aminmax", 0.7),
    _copy("tensor scale: amax and codes", 0.80),
    _peer("tensor scale: amax and codes", "torchao's tensorwise cast, compiled", 0.95),
    _copy("two layouts: 128x128", 0.85, note="28 by cvt"),
    _peer("two layouts: 128x128", "torchao's two kernels", 0.75),
    _copy("two layouts: MX", 0.85, note="15 by cvt"),
    _copy("two layouts: 1x128 and 128x1", 0.75, 0.60, "23 by cvt"),
    _peer("two layouts: 1x128 and 128x1", "torchao's two kernels", 0.85),
    _copy("adamw: fp32", 0.90, note="67", shape=PARAMETERS),
    _peer("adamw: fp32", "torch fused, fp32", 1.02, PARAMETERS),
    _copy("adamw: bf16-master", 0.88, note="about 75", shape=PARAMETERS),
    _peer("adamw: bf16-master", "torch fused, fp32, and a copy", 0.9, PARAMETERS),
    _copy("adamw: bf16-split", 0.85, note="about 90", shape=PARAMETERS),
    _peer("adamw: bf16-split", "torch fused, fp32", 0.98, PARAMETERS),
    _copy("adamw: bf16-kahan", 0.85, note="about 90", shape=PARAMETERS),
    _peer("adamw: bf16-kahan", "torch fused, fp32", 0.98, PARAMETERS),
    _copy("adamw: bf16-stochastic", 0.85, note="100", shape=PARAMETERS),
    _peer("adamw: bf16-stochastic", "torch fused, fp32", 0.85, PARAMETERS),
    _copy("adamw: bf16-collage-light", 0.75, note="about 120", shape=PARAMETERS),
    _copy("adamw: bf16-collage-plus", 0.75, note="about 120", shape=PARAMETERS),
    _copy("adamw: all bf16", 0.80, note="94", shape=PARAMETERS),
    _peer("adamw: all bf16", "torch fused, bf16", 1.05, PARAMETERS),
    _copy("adamw: all bf16, stochastic", 0.70, note="110", shape=PARAMETERS),
    _peer("adamw: all bf16, stochastic", "torchao _AdamW, stochastic", 0.9, PARAMETERS),
    _copy("adamw: FP8 moments", 0.60, 0.45, "98", PARAMETERS),
    _peer("adamw: FP8 moments", "torchao AdamWFp8", 0.8, PARAMETERS),
    _peer("adamw: FP8 moments", "torch fused, fp32", 0.6, PARAMETERS),
    _copy("adamw: 8-bit dynamic moments", 0.50, 0.40, "about 150", PARAMETERS),
    _peer("adamw: 8-bit dynamic moments", "bitsandbytes AdamW8bit", 0.95, PARAMETERS),
    _peer("adamw: 300 tensors, 8-bit dynamic moments", "bitsandbytes AdamW8bit", 0.5, "300 tensors"),
    _copy("norm: RMSNorm and codes", 0.80, note="about 25"),
    _peer("norm: RMSNorm and codes", "torch's norm, compiled, then our cast", 0.75),
    _least("product: tensor", "TFLOP/s", 1250, SQUARE),
    _least("product: tensor", "times bf16", 1.6, SQUARE),
    _least("product: row", "times bf16", 1.5, SQUARE),
    _least("product: 1x128 by 128x128", "times bf16", 1.35, SQUARE),
    *(
        _least(f"linear: {recipe}", "times bf16", least, LAYER)
        for recipe, least in (("fp8-delayed", 1.45), ("fp8-current", 1.35), ("fp8-rowwise", 1.25), ("fp8-block", 1.2))
    ),
    *(
        _peer(f"linear: {recipe}", "torchao, compiled", 1.05, LAYER)
        for recipe in ("fp8-delayed", "fp8-current", "fp8-rowwise", "fp8-block")
    ),
    Bar("linear: fp8-current, carried", "to bf16", "<=", 1.15, 1.15, LAYER),
    *(
        Bar(f"host of a layer: {recipe}", "to bf16", "<=", most, most, HOST)
        for recipe, most in (("fp8-current", 2.0), ("fp8-delayed", 2.0), ("fp8-rowwise", 2.5), ("fp8-block", 2.5))
    ),
    *(
        Bar(f"host of a layer: {recipe}", "launches beyond torch's", "<=", 8, 8, HOST)
        for recipe in ("fp8-current", "fp8-delayed", "fp8-rowwise", "fp8-block")
    ),
    _least("step: fp8-current", "times bf16-mixed", 1.15, STEP),
    _least("graphed step: fp8-current", "times bf16-mixed", 1.15, STEP),
    Bar("host: optimizer.step() over 300 tensors", "ms", "<=", 0.5, 0.5, "300 tensors"),
    Bar("host: optimizer.step() over 300 tensors", "launches beyond one a kind", "<=", 3, 3, "300 tensors"),
    Bar("host: optimizer.step() over 300 tensors", "waits for the GPU", "<=", 0, 0, "300 tensors"),
    Bar("host: optimizer.step() by new gradients", "to torch foreach", "<=", 1, 1, "300 tensors"),
)


def expectations() -> str:
    """The bars as the table of docs/gpu_figures.md."""
    lines = ["| row | measure | H100 | H200 | at |", "| --- | --- | --- | --- | --- |"]
    for bar in BARS:
        sign = "at least" if bar.at == ">=" else "at most"
        lines.append(f"| {bar.row} | {bar.measure} | {sign} {bar.h100:g} | {bar.h200:g} | {bar.shape} |")
    return "\n".join(lines)


def judge(
    rows: Mapping[str, Mapping[str, Any]], device: str, ended: Mapping[str, str] | None = None
) -> Iterator[Verdict]:
    """A verdict for every bar, including bars whose rows were not measured.

    Args:
        rows: by name, what each row found: `measures` by name, its `shape`; `failed`, or `left_out` by the peer's name.
        device: the name of the GPU.
        ended: by section, the last words of its process if it failed.
    """
    for bar in BARS:
        section = SECTIONS[bar.row.partition(":")[0]]
        row = rows.get(bar.row, {"failed": (ended or {}).get(section, "time was up before it")})
        value = row.get("measures", {}).get(bar.measure)
        number = bar.on(device)
        if value is None:
            why = row.get("failed") or row.get("left_out", {}).get(bar.measure.removeprefix("to "), "no such figure")
            yield Verdict(bar, "not measured", None, str(why))
        elif number is None:
            yield Verdict(bar, "not judged", value, f"bars are for H100 and H200; this is {device}")
        elif row.get("shape") != bar.shape:
            yield Verdict(bar, "not judged", value, f"at {row.get('shape')}; the bar is for {bar.shape}")
        else:
            met = value >= number if bar.at == ">=" else value <= number
            yield Verdict(bar, "met" if met else "missed", value)
