"""The section of docs/which_bf16.md on beta2, from the results of `ledger.py betas`."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any


LIGHT, PLUS, MATCHES = "bf16-collage-light", "bf16-collage-plus", 0.005
BETAS = """## Both values of beta2

The runs above have beta2 = 0.95, the usual value for large models. torch's default is 0.999, which bf16 rounds to 1: a
second moment stored in bf16, as in `bf16-collage-light`, then hardly decays. `bf16-collage-plus` stores it as the sum
of two bf16 tensors, and `bf16-kahan` in float32. `python benchmarks/ledger.py betas` trains the same model with both.

| recipe | beta2 | final loss | to fp32, same seed | from seed to seed |
| --- | --- | --- | --- | --- |"""


def both_betas(data: dict[str, Any]) -> Iterator[str]:
    """The section, line by line."""
    yield BETAS
    for beta2, found in data["comparisons"].items():
        for name, row in found["summary"].items():
            gap, ends = (
                ("", "") if name == "fp32" else (f"{row['gap']:+.2%}", f"{row['least']:+.2%} to {row['most']:+.2%}")
            )
            yield f"| `{name}` | {beta2} | {row['loss']:.4f} | {gap} | {ends} |"
    last = list(data["comparisons"])[-1]
    rows = data["comparisons"][last]["summary"]
    gap = rows[LIGHT]["gap"]
    experiment, machine = data["comparisons"][last]["experiment"], data["machine"]
    text = (
        f"With beta2 = {last} `{LIGHT}` lies {gap:+.2%} from fp32 and `{PLUS}` {rows[PLUS]['gap']:+.2%}. "
        + ("In so few steps this still matches" if gap < MATCHES else "This degrades")
        + ". It costs more if gradients shrink and a second moment that does not decay keeps steps too small: on "
        "a small regression `bf16-collage-light` degrades, [`collage-beta2`](claims.md#collage-beta2), and "
        f"`{PLUS}`, at 12 bytes, does not. {experiment['seeds']} seeds, {experiment['steps']} steps; torch "
        f"{machine['torch']} on {machine['cpu']}, one thread."
    )
    yield from ["", *textwrap.wrap(text, 120, break_long_words=False, break_on_hyphens=False)]
