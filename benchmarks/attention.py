"""Attention with the operands of both matmuls rounded to FP8, compared with `sdpa` of transformers.

Error: of the output and of the gradients of q, k and v, as relative Euclidean norms against float32, for standard
normal inputs. Time: process CPU time of forward and backward on one thread, as medians of ratios of interleaved pairs.

    python benchmarks/attention.py [--keep] [--pairs 30]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from halfstep import formats, get_quantizer
from halfstep.integrations.attention import attention
from halfstep.ops.part import own_part
from halfstep.quant import Quantizer, Scales
from halfstep.quant.scaling import get_scaling
from halfstep.quant.tile import TENSOR
from halfstep.recipe import AttentionSpec, LinearSpec, Matmul, linear_spec


KEPT = Path(__file__).parent / "results" / "attention.json"
BATCH, HEADS, TIME, WIDTH = 2, 8, 256, 64


def specs() -> dict[str, AttentionSpec]:
    """The attention specs by name: FP8 with one scale per tensor (softmax weights times a fixed 256), and MXFP8."""
    e4, e5 = (Quantizer(formats.get(f), scales=Scales(TENSOR, get_scaling("current"))) for f in ("e4m3fn", "e5m2"))
    p = Quantizer(formats.get("e4m3fn"), scales=Scales(TENSOR, get_scaling("fixed", bias=8)))
    mx = get_quantizer("mxfp8_e4m3", scale="rceil")
    blocks = linear_spec(input=mx, weight=mx, grad_output=mx)
    return {
        "fp8, a scale a tensor": AttentionSpec(
            scores=linear_spec(input=e4, weight=e4, grad_output=e5),
            mix=LinearSpec(Matmul(p, e4), Matmul(e5, e4), Matmul(e5, p)),
        ),
        "mxfp8": AttentionSpec(scores=blocks, mix=blocks),
    }


def passes(forward, module, tensors, grad):
    """The output, and the gradients of q, k and v."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    output, _ = forward(module, *leaves, None, scaling=WIDTH**-0.5, is_causal=True)
    output.backward(grad)
    return [output.detach(), *(leaf.grad for leaf in leaves)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keep", action="store_true", help=f"write {KEPT.name}")
    parser.add_argument("--pairs", type=int, default=30)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tensors = [torch.randn(BATCH, HEADS, TIME, WIDTH) for _ in range(3)]
    grad = torch.randn(BATCH, TIME, HEADS, WIDTH)
    stock = torch.nn.Module()
    exact = passes(sdpa_attention_forward, stock, tensors, grad)
    found = {}
    for name, spec in specs().items():
        module = torch.nn.Module()
        own_part(module).attention = spec
        got = passes(attention, module, tensors, grad)
        errors = [float((a - b).norm() / b.norm()) for a, b in zip(got, exact, strict=True)]
        ratios = []
        for _ in range(options.pairs):
            spent = []
            for forward, owner in ((sdpa_attention_forward, stock), (attention, module)):
                start = time.process_time()
                passes(forward, owner, tensors, grad)
                spent.append(time.process_time() - start)
            ratios.append(spent[1] / spent[0])
        found[name] = {
            "error": dict(zip(("output", "q", "k", "v"), (round(e, 4) for e in errors), strict=True)),
            "time": round(statistics.median(ratios), 2),
        }
        print(name, found[name])
    if options.keep:
        setup = {"batch": BATCH, "heads": HEADS, "time": TIME, "width": WIDTH, "torch": torch.__version__}
        KEPT.write_text(json.dumps({"setup": setup, "of_sdpa": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
