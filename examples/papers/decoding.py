"""Post-training quantization and decoding (Roy 2023, arXiv 2309.05210): 4 and 8 bits by temperature, top-k and length.

Trains small Llama and Falcon models on the bytes of Python's standard library and quantizes their weights to nf4 and
fp4, with scales in float32 and double-quantized, and to int8: by halfstep and by bitsandbytes. Measures the KL
divergence of the next byte's distribution from the unquantized model's, by temperature; the likelihood of generated
text under the unquantized model, and its repetition; bytes; and for larger models the CPU time of generation.
"""

from __future__ import annotations

import copy
import math
import time
from dataclasses import asdict
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from statistics import fmean
from typing import Any

import bitsandbytes as bnb
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from next_byte import batch, generated, repeated
from study import Kept, difference, in_codes, options, table, text
from torch import Tensor, nn
from transformers import FalconConfig, FalconForCausalLM, LlamaConfig, LlamaForCausalLM

from halfstep.lab.interval import paired
from halfstep.lab.task import Corpus, load_corpus
from halfstep.quant import get_quantizer


CONTEXT, PROMPT = 96, 16
TEMPERATURES = (0.3, 0.5, 0.65, 0.8, 1.0, 1.3, 2.0, 4.0)
SAMPLED, TOP = (0.5, 0.65, 0.8, 1.0), (0, 8)
WEIGHTS = {
    "nf4": get_quantizer("nf4"),
    "nf4-dq": get_quantizer("nf4", scale="double_absmax"),
    "fp4": get_quantizer("bnb_fp4"),
    "fp4-dq": get_quantizer("bnb_fp4", scale="double_absmax"),
    "int8": get_quantizer("int8_row"),
}
ARCHITECTURES: dict[str, Any] = {
    "llama": lambda **shape: LlamaForCausalLM(LlamaConfig(**shape, intermediate_size=shape["hidden_size"] * 5 // 2)),
    "falcon": lambda **shape: FalconForCausalLM(FalconConfig(**shape)),
}


def built(architecture: str, width: int, heads: int) -> Any:
    """A model of bytes with random weights."""
    shape = {"vocab_size": 256, "hidden_size": width, "num_hidden_layers": 2, "num_attention_heads": heads}
    return ARCHITECTURES[architecture](**shape, max_position_embeddings=256, bos_token_id=0, eos_token_id=0)


def trained(architecture: str, seed: int, corpus: Corpus, width: int, steps: int) -> Any:
    """A model trained in float32."""
    torch.manual_seed(seed)
    model, draw = built(architecture, width, 4), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 4e-3 * min(1.0, (step + 1) / 40) * 0.5 * (1 + math.cos(math.pi * step / steps))
        loss = bits(model, batch(corpus, 12, CONTEXT, draw))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model.eval()


def bits(model: Any, ids: Tensor) -> Tensor:
    """Bits per byte of text."""
    return F.cross_entropy(model(ids[:, :-1]).logits.flatten(0, 1), ids[:, 1:].flatten()) / math.log(2)


def quantized(model: Any, name: str, compute: str) -> Any:
    """A copy with weights in codes: by halfstep, or by bitsandbytes if the name begins with bnb."""
    if name in WEIGHTS:
        return in_codes(model, WEIGHTS[name], compute)
    twin = copy.deepcopy(model)
    for module in list(twin.modules()):
        for path, layer in list(module.named_children()):
            if isinstance(layer, nn.Linear) and path != "lm_head":
                setattr(module, path, _theirs(layer, name.removeprefix("bnb ")))
    return twin


def _theirs(layer: nn.Linear, name: str) -> nn.Module:
    shape, weight, new = (layer.in_features, layer.out_features, False), layer.weight.detach(), None
    if name == "int8":
        new = bnb.nn.Linear8bitLt(*shape, has_fp16_weights=False, threshold=6.0)
        new.weight = bnb.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
    else:
        how = {"compress_statistics": name.endswith("-dq"), "quant_type": name.removesuffix("-dq")}
        new = bnb.nn.Linear4bit(*shape, compute_dtype=weight.dtype, **how)
        new.weight = bnb.nn.Params4bit(weight, requires_grad=False, **how)
    return new.to("cpu")


def stored(model: Any) -> int:
    """Bytes of a model's tensors, including scales."""
    total = sum(t.nbytes for t in {id(t): t for t in (*model.parameters(), *model.buffers())}.values())
    for state in (getattr(p, "quant_state", None) for p in model.parameters()):
        if state is not None:
            total += state.absmax.nbytes + (state.state2.absmax.nbytes + state.offset.nbytes if state.nested else 0)
    return total


@torch.no_grad()
def study(architecture: str, seed: int, corpus: Corpus, sizes: dict[str, Any]) -> dict[str, Any]:
    """One run: a model is trained, quantized in every way, and compared with the unquantized one."""
    with torch.enable_grad():
        model = trained(architecture, seed, corpus, sizes["width"], sizes["steps"])
    texts, lengths = sizes["texts"], sizes["lengths"]
    starts = torch.randint(len(corpus.held_out) - CONTEXT - 1, (4 * texts,), generator=torch.Generator().manual_seed(7))
    held = corpus.windows("held_out", starts, CONTEXT + 1)
    whole = model(held[:, :-1]).logits
    run: dict[str, Any] = {"bits": float(bits(model, held)), "bytes": {"whole": stored(model)}}
    kl, agree, more, sampled = {}, {}, {}, {}
    for name in (*WEIGHTS, *(f"bnb {name}" for name in WEIGHTS)):
        twin = quantized(model, name, "fp32")
        own = twin(held[:, :-1]).logits
        kl[name] = [divergence(whole / t, own / t) for t in TEMPERATURES]
        agree[name] = float((whole.argmax(-1) == own.argmax(-1)).float().mean())
        more[name], run["bytes"][name] = float(bits(twin, held)) - run["bits"], stored(twin)
        if name in WEIGHTS:
            sampled[name] = judged(twin, model, held[:texts, :PROMPT], lengths)
    sampled["whole"] = judged(model, model, held[:texts, :PROMPT], lengths)
    return run | {"kl": kl, "agree": agree, "more_bits": more, "sampled": sampled}


def divergence(whole: Tensor, other: Tensor) -> float:
    """The mean KL divergence of two distributions in nats, computed in float64."""
    p, q = (logits.double().log_softmax(-1) for logits in (whole, other))
    return float((p.exp() * (p - q)).sum(-1).mean())


def judged(model: Any, judge: Any, prompts: Tensor, lengths: list[int]) -> dict[str, dict[str, float]]:
    """Bits per byte under the judge, and repetition, of generated text, by temperature, top-k and length."""
    found = {}
    for top, temperature in product(TOP, SAMPLED):
        ids = generated(model, prompts, max(lengths), temperature, top, torch.Generator().manual_seed(1))
        each = F.cross_entropy(judge(ids[:, :-1]).logits.transpose(1, 2), ids[:, 1:], reduction="none")
        for end in (PROMPT + length for length in lengths):
            own = float(each[:, PROMPT - 1 : end - 1].mean()) / math.log(2)
            found[f"{temperature} {top} {end - PROMPT}"] = {"bits": own, "repeated": repeated(ids[:, PROMPT:end])}
    return found


def speed(architecture: str, width: int, rounds: int, new: int) -> dict[str, list[float]]:
    """CPU time of generation relative to bf16's in the same round, by format of the weights, on one thread."""
    torch.manual_seed(0)
    whole = built(architecture, width, 8).eval()
    models = {"bf16": copy.deepcopy(whole).bfloat16(), "fp32": whole}
    models |= {name: quantized(whole, name, "bf16") for name in WEIGHTS}
    models |= {f"bnb {name}": quantized(models["bf16"], f"bnb {name}", "") for name in WEIGHTS}
    prompt, draw = torch.randint(256, (1, PROMPT)), torch.Generator()
    times: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(rounds + 1):  # the first one fills caches
        for name, model in models.items():
            start = time.process_time()
            generated(model, prompt, new, 1.0, 0, draw)
            times[name].append(time.process_time() - start)
    return {name: [a / b for a, b in zip(each, times["bf16"], strict=True)][1:] for name, each in times.items()}


def main() -> None:
    """Train, quantize, measure, print and save."""
    given = options(__doc__ or "", "runs/decoding.json")
    torch.set_num_threads(1)
    sizes: dict[str, Any] = {"width": 128, "steps": 300, "texts": 12, "lengths": [32, 80]}
    if given.quick:
        sizes = {"width": 64, "steps": 2, "texts": 2, "lengths": [6]}
    rounds, wide, new = (2, 64, 2) if given.quick else (5, 768, 16)
    corpus = load_corpus(None, CONTEXT)
    kept = Kept(given.out, **sizes, temperatures=TEMPERATURES)
    found: dict[str, list[dict[str, Any]]] = {architecture: [] for architecture in ARCHITECTURES}
    for seed in range(given.seeds):
        for architecture, runs in found.items():
            runs.append(kept.run(f"{architecture}, seed {seed}", partial(study, architecture, seed, corpus, sizes)))
    speeds = {a: kept.run(f"{a}, speed, width {wide}", partial(speed, a, wide, rounds, new)) for a in ARCHITECTURES}
    concluded = {architecture: conclusions(runs, max(sizes["lengths"])) for architecture, runs in found.items()}
    for architecture, runs in found.items():
        print(f"\n{architecture}, mean (95% interval); whole {text([run['bits'] for run in runs], '.4g')} bits a byte:")
        header = ("weights", "KL at 0.5, 1e-3 nats", "KL at 1", "other byte, %", "more bits, 1e-3", "bytes")
        table(header, [line(name, runs) for name in runs[0]["kl"]])
        print(f"KL over that at the temperature before: at most {concluded[architecture]['worst_fall']:.2f}")
        for what, interval in concluded[architecture]["intervals"].items():
            print(f"  {what}: {interval['low']:+.4g} to {interval['high']:+.4g}")
    print("\nCPU time of generation over bf16's, mean (95% interval) of rounds:")
    names = list(speeds["llama"])[1:]
    table(("weights", *speeds), [(name, *(text(speeds[a][name]) for a in speeds)) for name in names])
    times = {a: {name: asdict(paired(each[name])) for name in names} for a, each in speeds.items()}
    kept.write(concluded=concluded, times=times)
    picture(found, given.out.with_suffix(".png"), max(sizes["lengths"]))


def line(name: str, runs: list[dict[str, Any]]) -> tuple[str, ...]:
    """A row of the table: one format of the weights, over all runs of an architecture."""
    kl = [[1e3 * run["kl"][name][TEMPERATURES.index(t)] for run in runs] for t in (0.5, 1.0)]
    other = [100 * (1 - run["agree"][name]) for run in runs]
    more = [1e3 * run["more_bits"][name] for run in runs]
    return name, *map(text, (*kl, other, more)), f"{runs[0]['bytes'][name] / runs[0]['bytes']['whole']:.3f}"


def conclusions(runs: list[dict[str, Any]], length: int) -> dict[str, Any]:
    """The results on the paper's claims for one architecture, as intervals over seeds."""

    def sampled(name: str, temperature: float, what: str) -> list[float]:
        return [run["sampled"][name][f"{temperature} 0 {length}"][what] for run in runs]

    def steepness(name: str) -> list[float]:
        return [high - low for low, high in zip(*(sampled(name, t, "bits") for t in (0.5, 0.8)), strict=True)]

    found = {}
    for t in (0.5, 1.0):
        kl = [[run["kl"][name][TEMPERATURES.index(t)] for name in ("fp4", "nf4")] for run in runs]
        found[f"fp4's KL over nf4's at {t}"] = paired([four / normal for four, normal in kl])
    for name in ("nf4", "fp4", "int8"):
        found[f"{name}, bits from 0.5 to 0.8, less whole's"] = difference(steepness(name), steepness("whole"))
        for what, t in product(("bits", "repeated"), SAMPLED):
            ours, others = sampled(name, t, what), sampled("whole", t, what)
            found[f"{name}, {what} at {t}, less whole's"] = difference(ours, others)
    falls = [b / a for run in runs for each in run["kl"].values() for a, b in pairwise(each)]
    return {"worst_fall": max(falls), "intervals": {what: asdict(each) for what, each in found.items()}}


def picture(found: dict[str, list[dict[str, Any]]], path: Path, length: int) -> None:
    """KL by temperature, and bits of generated text, of every format and architecture; means over seeds."""
    figure, axes = plt.subplots(2, 2, figsize=(8, 6), layout="constrained", sharey="row", sharex="row")
    for (upper, lower), (architecture, runs) in zip(axes.T, found.items(), strict=True):
        for name in WEIGHTS:
            means = [fmean(each) for each in zip(*(run["kl"][name] for run in runs), strict=True)]
            upper.loglog(TEMPERATURES, means, "o-", ms=3, label=name)
        for name in (*WEIGHTS, "whole"):
            values = [fmean(run["sampled"][name][f"{t} 0 {length}"]["bits"] for run in runs) for t in SAMPLED]
            lower.plot(SAMPLED, values, "k--" if name == "whole" else "o-", ms=3, label=name)
        upper.set(title=architecture, xlabel="temperature", ylabel="KL to the unquantised model, nats")
        upper.set_xticks(TEMPERATURES, TEMPERATURES, fontsize=7)
        upper.minorticks_off()
        lower.set(xlabel="temperature", ylabel="bits a byte of generated text")
        upper.legend(fontsize=8)
        lower.legend(fontsize=8)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
