"""The text of docs/which_bf16.md and docs/zeroed.md, generated from the results."""

from __future__ import annotations

import inspect
import textwrap
from typing import Any

import two_loops
from which_bf16_betas import both_betas
from which_bf16_finetune import fine_tuning


Figures = dict[str, Any]
PURE, CAST = two_loops.LOOPS

INTRODUCTION = """# model.to(bfloat16), or autocast?

Should one call `model.to(bfloat16)` and `x.to(bfloat16)`, with no master copy and bf16 gradients, or train under
`torch.autocast`? The question comes from a forum; the verdict is below. A recipe is one line:

```
model, optimizer, scaler = halfstep.prepare(model, optimizer, recipe="bf16-stochastic")
```

`make bench-which-bf16` writes this page.
"""
OLDER = (
    " The verdicts on lm follow this rule, used before 22 November 2026, because final losses by seed of these runs "
    "were not saved; those on vision follow the present one ([demo.md](demo.md)), with fp32's seeds for noise."
)
KAHAN = (
    "The figures of `bf16-kahan`, `bf16-collage-light` and `bf16-collage-plus` are from before 22 November 2026. Their "
    "first step then dropped about 3 in 1,000 of the compensations that it starts with, and now drops none; the table "
    "of both values of beta2 has the present figures."
)
LOOPS = """## Both loops, as asked

Both loops are in plain torch, with torch's AdamW, and have the clipping and the schedule of the runs below, where the
first loop is `bf16-pure` and the second `bf16-mixed`. On a GPU `x.device.type` is `"cuda"`.

```python
{code}```

| loop | task | seeds | verdict | final loss | to fp32, same seed | bytes/param | descent quality {steps} | time |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |"""
RECIPES = """## Every way to keep the weights in bf16

| recipe | verdict | final loss | to fp32, same seed | bytes/param | descent quality {steps} | lost share | time |
| --- | --- | --- | --- | --- | --- | --- | --- |"""


def which_bf16(data: Figures, betas: Figures, tuned: Figures) -> str:
    """docs/which_bf16.md, from the runs of this benchmark, of `ledger.py betas` and of `which_bf16_finetune.py`."""
    lm = data["tasks"]["lm"]
    at = [row["step"] for row in lm["recipes"]["fp32"]["descent"]]
    steps = "at " + ", ".join(f"{100 * step // data['steps']}%" for step in shown(at))
    lines = [
        INTRODUCTION,
        "## Verdict",
        "",
        *verdict(data),
        *tuned_verdict(tuned),
        "",
        LOOPS.format(code=code(), steps=steps),
    ]
    for loop in two_loops.LOOPS:
        for task, found in data["tasks"].items():
            row = found["loops"][loop]
            time = f"{data['times'][loop]:.2f}" if task == "lm" else ""
            lines.append(f"| {loop} | {task} | {row['seeds']} | {cells(row)} | {qualities(row)} | {time} |")
    for task, found in data["tasks"].items():
        fp32 = found["band"]
        lines += ["", f"fp32 on {task}: {fp32['mean']:.4f} ± {fp32['half_width']:.4f}, {fp32['seeds']} seeds."]
    lines += ["", RECIPES.format(steps=steps)]
    for name, row in sorted(lm["recipes"].items(), key=lambda item: -total(item[1])):
        lost = " / ".join(share(look["lost_share"]) for look in shown(row["descent"]))
        lines.append(f"| `{name}` | {cells(row)} | {qualities(row)} | {lost} | {data['times'][name]:.2f} |")
    lines += ["", *notes(lm["rule"], shown(at)), "", machine(data), "", *fine_tuning(tuned), "", *both_betas(betas)]
    return "\n".join(lines) + "\n"


def verdict(data: Figures) -> list[str]:
    """The lines of the verdict."""
    lm, vision = data["tasks"]["lm"], data["tasks"]["vision"]
    rows, loops, other = lm["recipes"], lm["loops"], vision["loops"][PURE]
    fits = {name for name, row in {**rows, **loops}.items() if row["status"] == "matches"}
    good = sorted((name for name in rows if name in fits and name != "fp32"), key=lambda name: total(rows[name]))
    answer = {
        (True, True): "Either works here.",
        (False, True): "Autocast, or a recipe that keeps what an update rounds away.",
        (True, False): "model.to(bfloat16), here.",
        (False, False): "Neither matches fp32 here.",
    }[PURE in fits, CAST in fits]
    lines = [f"**{answer}** On a small GPT, after {data['steps']} steps:", ""]
    for loop, row in loops.items():
        lines += item(f"`{loop}`, {total(row):g} bytes a parameter: {gap(row)} to fp32's loss, {row['status']}.")
    lines += item(f"These match fp32: {listed(rows, good)}." if good else "No bf16 recipe matches fp32.")
    bad = [name for name in rows if name not in fits]
    lines += item(f"These do not: {listed(rows, bad)}.") if bad else []
    if good:
        beta2 = lm["experiment"]["betas"][1]
        lines += item(
            f"The cheapest that matches is `{good[0]}`, {total(rows[good[0]]):g} bytes, with beta2 = {beta2:g}; "
            "for 0.999 see [below](#both-values-of-beta2)."
        )
    without, pure = rows["bf16-nomaster"], rows["bf16-pure"]
    if "bf16-master" in fits and "bf16-nomaster" not in fits:
        lines += item(
            "bf16 gradients do no harm: `bf16-master` has them, and matches. The harm comes from adding updates to a "
            "bf16 weight, which rounds them away, more so as the learning rate falls."
        )
    if without["status"] == pure["status"] == "degrades":
        lines += item(
            f"fp32 optimizer states do not help: {gap(without)} with them (`bf16-nomaster`), {gap(pure)} "
            "without "
            "(`bf16-pure`). Note that torch's AdamW keeps its states in the weights' dtype: after "
            "`model.to(bfloat16)` they "
            "are bf16 too, 8 bytes in all and not 12."
        )
    if "bf16-stochastic" in fits and "bf16-nomaster" not in fits:
        lines += item("The fix needs no more bytes: `bf16-stochastic` has as many as `bf16-nomaster`, and matches.")
    spread = vision["band"]["half_width"] / vision["band"]["mean"] / 2
    found = "for `{}` {} seeds cannot tell" if other["status"] == "cannot tell" else "`{0}` {2}"
    lines += item(
        "On a small network on images, whose inputs `x.to(bfloat16)` rounds too, "
        f"{found.format(PURE, other['seeds'], other['status'])}: {gap(other)} to fp32's loss with the same seed, where "
        f"fp32's own seeds have a standard deviation of {spread:.0%}."
    )
    return lines + item("Weights do not become zero in the cast: [zeroed.md](zeroed.md).")


def tuned_verdict(tuned: Figures) -> list[str]:
    """The lines of the verdict on fine-tuning."""
    rate, found = next(iter(tuned["rates"].items()))
    without, cure = found["shares"]["bf16-nomaster"], found["shares"]["bf16-stochastic"]
    return item(
        f"[Fine-tuning](#fine-tuning) at {rate} of a GPT whose weights are in bf16 without masters reaches "
        f"{without['mean']:.0%} of fp32's improvement, with stochastic rounding {cure['mean']:.0%}."
    )


def notes(rule: str, at: list[int]) -> list[str]:
    """The lines that explain the tables."""
    return [
        *item(f"*Verdict*: {rule}" + ("" if "interval" in rule else OLDER)),
        *item(KAHAN),
        *item(
            "*Bytes* are measured on live tensors between backward and step: weights, gradients, master, states. The "
            "bf16 "
            "copies that autocast makes while a pass runs (up to 2 bytes) are not included."
        ),
        *item(
            "*Descent quality* is the share of an update that reaches the stored weights, masters included: 1 if "
            "nothing is lost, 0 if everything stalls. *Lost share* is the share of updates that change nothing. Both "
            f"are means over seeds, at steps {', '.join(map(str, at))}. At the last of these the learning rate is "
            "almost zero, and the quality under stochastic rounding is noise around 1."
        ),
        *item(
            "*Time* is a training step over fp32's, interleaved in one run on one thread. This processor has no "
            "native 16-bit matmuls: the column shows the cost of rounding here, not the gain on a GPU."
        ),
        *item(
            "There is one backward a step and nothing to accumulate, so `bf16-fp32grad` trains like `bf16-nomaster`, "
            "and `bf16-megatron` like `bf16-master`. With many micro-batches a step they would differ."
        ),
    ]


def item(text: str) -> list[str]:
    """One list item, wrapped to lines."""
    return textwrap.wrap(f"- {text}", 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def listed(rows: Figures, names: list[str]) -> str:
    """Recipes with their bytes and gaps."""
    return ", ".join(f"`{n}` ({total(rows[n]):g} bytes, {gap(rows[n])})" for n in names)


def gap(row: Figures) -> str:
    """The gap to fp32 with the same seed."""
    return "diverged" if row["paired_gap"] is None else f"{round(row['paired_gap'], 4) + 0.0:+.2%}"


def total(row: Figures) -> float:
    """Bytes per parameter, without those that only exist during a pass."""
    return float(sum(v for role, v in row["bytes_per_parameter"].items() if role != "transient"))


def cells(row: Figures) -> str:
    """The table cells for verdict, loss, gap and bytes."""
    loss = "" if row["final_loss"] is None else f"{row['final_loss']:.4f}"
    kept = [f"{v:g}" for role, v in row["bytes_per_parameter"].items() if v and role != "transient"]
    return f"{row['status']} | {loss} | {gap(row)} | {'+'.join(kept)} = {total(row):g}"


def qualities(row: Figures) -> str:
    """Descent quality at the steps shown."""
    return " / ".join(f"{look['quality'] + 0.0:.3f}" for look in shown(row["descent"]))


def shown(values: list[Any]) -> list[Any]:
    """The first, the last but one and the last of the recorded steps."""
    return [values[0], *values[-2:]]


def share(value: float) -> str:
    """A share in percent, with enough digits to distinguish it from 0% and 100%."""
    if value in (0, 1):
        return f"{value:.0%}"
    return f"{value:.1%}" if 0.001 <= value < 0.9995 else f"{value:.2%}" if value > 0.5 else f"{value:.0e}"


def code() -> str:
    """The source of both loops, without imports and the table of loops."""
    source = inspect.getsource(two_loops)
    return source[source.index("from collections") : source.index("\n\nLOOPS")]


def machine(data: Figures) -> str:
    """A sentence on the machine, the model and its size."""
    lm, where = data["tasks"]["lm"], data["machine"]
    experiment = lm["experiment"]
    return textwrap.fill(
        f"{experiment['model']}, {lm['zeroed']['parameters']:,} parameters, {experiment['batch']} x "
        f"{experiment['context']} "
        f"bytes of the Python standard library a step, {data['steps']} steps (as `halfstep compare` takes). "
        f"torch {where['torch']} on {where['cpu']}, one thread.",
        120,
    )


ZEROED = """# Do weights become zero in the cast?

`make bench-which-bf16` writes this page. A reply in a forum says that bf16 training suffers because *a significant
number of weight values become zero when cast to bf16 (fp16)*. The table counts over the fp32 runs of
[which_bf16.md](which_bf16.md). For weights and gradients it gives the share of non-zero values that a cast
without any scale makes zero. For updates it gives the share that is lost when they are added to a weight stored in
that format. The figures are means over {seeds} seeds at steps {steps}.

| | {formats} |
| --- | {rule} |"""


def zeroed(data: Figures) -> str:
    """docs/zeroed.md."""
    found = data["tasks"]["lm"]["zeroed"]
    shares, steps = found["shares"], found["steps"]
    formats = list(shares["weights"])
    header = " | ".join(formats)
    lines = [
        ZEROED.format(
            seeds=data["seeds"],
            steps=", ".join(map(str, shown(steps))),
            formats=header,
            rule=" | ".join("---" for _ in formats),
        )
    ]
    words = {"weights": "weights, zero", "gradients": "weight gradients, zero", "updates": "updates, lost"}
    for what, table in shares.items():
        row = [" / ".join(share(v) for v in shown(table[name])) for name in formats]
        lines.append(f"| {words.get(what, f'{what}, zero')} | {' | '.join(row)} |")
    worst = {name: max(shares["weights"][name]) for name in formats}
    updates, gradients = shares["updates"]["bf16"], shares["gradients"]
    refuted = worst["bf16"] == 0 and worst["fp16"] < 1e-3
    lines += [
        "",
        *item(
            f"**{'Contradicted' if refuted else 'Not contradicted'}.** Of {found['parameters']:,} weights bf16 zeroes "
            f"{share(worst['bf16'])}, fp16 at most {share(worst['fp16'])}. The smallest of the runs lies at "
            f"2^{found['smallest']}; "
            "fp16 reaches down to 2^-24, bf16 to 2^-133."
        ),
        *item(
            f"What bf16 loses is *updates*: {share(updates[0])} of them early, {share(updates[-2])} at step "
            f"{steps[-2]}, "
            f"{share(updates[-1])} when the learning rate is gone. That is why something must store the rest of an "
            "update; "
            "a count of zeroed weights does not show it."
        ),
        *item(
            f"What fp16 loses without a loss scale is *gradients*: "
            f"{share(max(shares['activation gradients']['fp16']))} of the "
            f"activations' at the worst of the steps, {share(max(gradients['fp16']))} of the weights'."
        ),
        *item(
            f"FP8 without a scale does zero weights: e4m3fn zeroes up to {share(worst['float8_e4m3fn'])} of the "
            "weights and "
            f"{share(max(gradients['float8_e4m3fn']))} of their gradients, e5m2 {share(worst['float8_e5m2'])} and "
            f"{share(max(gradients['float8_e5m2']))}."
        ),
        "",
        machine(data),
        "",
    ]
    return "\n".join(lines)
