"""Verdicts on tensors of generated histories: none is certain and wrong, and no fewer are right than before."""

import re
from collections import Counter

import pytest
import torch
from pipelines import SPACES, Pipeline, circulant, drawn, made, right, untrue
from torch import Tensor

from families import for_each
from halfstep.bits.origin import origin
from halfstep.bits.scan import scan
from halfstep.bits.sentences import Evidence, verdict
from halfstep.bits.values import InMemory


DRAWN = {"tuned on": (1, (256, 384), 6), "held out": (4711, (384, 512), 6)}
"""Seed, shape, and number of pipelines per family."""

BEFORE = {"held out": (43, 43)}
"""Right answers, and certain and right answers, of the inspector before these tests were used to improve it."""


def origin_and_verdict(tensor: Tensor):
    """The origin of the tensor, and the verdict on a file that holds only this tensor."""
    scanned = scan(InMemory(tensor))
    named_origin = origin(scanned, str(tensor.dtype)[6:])
    return named_origin, verdict([Evidence(named_origin.stored, tensor.numel(), named_origin, scanned.table.nonzero)])


def judged(one: Pipeline) -> Counter:
    named_origin, found = origin_and_verdict(made(one))
    wrong, certain = untrue(one, found.text) is not None, found.confidence == "certain"
    named = not wrong and re.fullmatch(right(one), named_origin.key) is not None
    named &= one.family != "slivers" or not certain  # one percent of the values is evidence
    if wrong and certain:
        print(one.name, "is told to be", named_origin.key, untrue(one, found.text))
    return Counter(count=1, right=named, sure=named and certain, wrong=wrong, fatal=wrong and certain)


@pytest.mark.slow
@for_each("half", DRAWN)
def test_no_verdict_is_certain_and_wrong(half):
    found = {family: Counter() for family in SPACES}
    for one in drawn(*DRAWN[half]):
        found[one.family] += judged(one)
    for family, counts in found.items():
        print(f"{half}, {family}: {counts['right']} of {counts['count']} right, {counts['sure']} of them certain")
    total = sum(found.values(), Counter())
    print(f"{half}: {dict(total)}")
    assert total["count"] >= 75
    assert total["fatal"] == 0
    right_before, sure_before = BEFORE.get(half, (0, 0))
    assert total["right"] >= right_before
    assert total["sure"] >= sure_before


@for_each("one", drawn(3, (128, 256), 1), ids=lambda one: one.name)
def test_one_pipeline_per_family_is_not_certain_and_wrong(one):
    assert not judged(one)["fatal"]


def random(*shape: int) -> Tensor:
    return torch.randn(*shape)


def signs(*shape: int) -> Tensor:
    return (torch.randn(*shape) * 0.9).round().clamp(-1, 1)


def sliver() -> Tensor:
    values = torch.exp2(torch.randint(-9, 0, (256, 128)).float())
    values[::16, ::10] = random(16, 13)
    return values


def integers(bits: int) -> Tensor:
    codes = torch.randint(1 - 2 ** (bits - 1), 2 ** (bits - 1), (64, 512)).float()
    return codes.view(-1, 32).mul(torch.exp2(torch.arange(1024) % 3 - 9.0)[:, None]).view(64, 512)


def rounded(x: Tensor, bits: int) -> Tensor:
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp((mantissa * 2.0**bits).round() / 2.0**bits, exponent)


def symmetric(bits: int, *shape: int) -> Tensor:
    groups, most = random(*(shape or (64, 4, 128))), 2 ** (bits - 1) - 1
    scale = groups.abs().amax(-1, keepdim=True) / most
    return ((groups / scale).round() * scale).flatten(1)


def filters() -> Tensor:
    return symmetric(8, 64, 504).view(64, 56, 3, 3)


TOLD = {
    "ternary": (lambda: (signs(128, 256) * 0.0373).half(), "levels.*", "codes of few bits"),
    "binary": (lambda: (random(128, 256).sign() * 0.0373).half(), "levels.*", "codes of few bits"),
    "ternary by rows": (lambda: signs(512, 128) * torch.rand(512, 1), "levels row", "no more than 1 different"),
    "a sliver": (sliver, "full", r"only 0\.6\d+% of the values are evidence"),
    "a constant": (lambda: torch.full((64, 64), 0.1), "unknown", "too few different values"),
    "a convolution": (lambda: filters(), "scaled int8.*", "quantised to int8"),
    "its scales folded": (lambda: filters() * torch.rand(56, 1, 1), "full", "codes under scales of other places"),
    "a flat parameter": (lambda: symmetric(8).flatten(), "full", "codes under scales of other places"),
    "a scaled copy": (lambda: random(64, 512).bfloat16().float() * 0.1, "scaled bf16", "bf16 values that were scaled"),
    "a folded norm": (lambda: random(128, 256).half().float() * torch.rand(256), "scaled fp16 column", "folded"),
    "heads repeated": (lambda: random(8, 512).repeat_interleave(16, 0).bfloat16(), "full", "repeat others"),
    "doubled": (lambda: random(64, 128).repeat(1, 2), "full", "repeat others"),
    "grown": (lambda: random(128, 128)[:, torch.randint(0, 40, (128,))], "full", "repeat others"),
    "block-circulant": (lambda: circulant(random(256, 128)), "full", "repeat others"),
    "updates by signs": (lambda: signs(64, 256).cumsum(0).clamp(-7, 7) * 3e-4, "scaled int4", "counted in equal steps"),
    "counts": (lambda: torch.poisson(torch.full((64, 64), 300.0)) / 1000, "levels", "counted in equal steps"),
    "tf32 near 1": (lambda: rounded(1 + 0.1 * random(1024), 11), "fp16", "saved from fp16 or tf32 weights"),
    "a uniform draw": (lambda: (torch.rand(1 << 20) * 2 - 1).bfloat16(), "fp16", "cast from fp16 or a uniform draw"),
    **{f"int{n} under 2^k": (lambda n=n: integers(n), f"scaled int{n}", f"quantised to int{n}") for n in (4, 5, 6)},
    "int2 groups": (lambda: symmetric(2).bfloat16(), "levels 1x128", "codes of few bits"),
    **{f"int{n} groups": (lambda n=n: symmetric(n), rf"scaled int{n} 1x128", f"to int{n} in") for n in (3, 5, 6, 7)},
}  # fmt: skip
"""A function that makes a tensor, a pattern of its key, and a pattern of the verdict's text."""


@for_each("name", TOLD)
def test_formerly_wrong_verdicts_are_right(name):
    make, key, text = TOLD[name]
    named_origin, found = origin_and_verdict(make())
    assert re.fullmatch(key, named_origin.key), named_origin.key
    assert re.search(text, found.text), found.text
    hedged = {"a sliver": "none", "a constant": "none", "a uniform draw": "likely"}
    assert found.confidence == hedged.get(name, "certain")


def test_verdict_states_the_share_of_tensors_without_evidence():
    known, full = origin_and_verdict(random(64, 64))[0], 4096
    silent = Evidence("float32", 99 * full, origin(scan(InMemory(torch.ones(64, 64))), "float32"), 99 * full)
    found = verdict([Evidence("float32", full, known, full), silent])
    assert found.confidence == "likely"
    assert "1 tensor with too little to tell (99% of values that are not zero)" in found.text
