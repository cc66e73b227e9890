"""`mismatch` between trainer and rollout: against separate log-probabilities, over batch sizes, padding, bad input."""

import copy
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributions import Categorical, kl_divergence

import halfstep
from halfstep.errors import DataError, ModelError, RecipeError
from halfstep.recipe import from_data, get_recipe, list_recipes
from tiny import RECIPES, SMOOTH, Gated, fast_and_every


class Causal(nn.Module):
    """An embedding, two blocks with causal attention, and a head."""

    def __init__(self, width=32, vocabulary=48):
        super().__init__()
        torch.manual_seed(0)
        self.wte = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList([nn.ModuleDict(self.block(width)) for _ in range(2)])
        self.unembed = nn.Linear(width, vocabulary)
        with torch.no_grad():
            self.unembed.weight.mul_(4)

    @staticmethod
    def block(width):
        return {"qkv": nn.Linear(width, 3 * width), "out": nn.Linear(width, width), "mlp": nn.Linear(width, width)}

    def forward(self, tokens):
        x = self.wte(tokens)
        for block in self.blocks:
            q, k, v = block["qkv"](x).chunk(3, -1)
            x = x + block["out"](nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
            x = x + block["mlp"](x.relu())
        return self.unembed(x)


def tokens(rows=8, length=16, seed=1):
    return torch.randint(0, 48, (rows, length), generator=torch.Generator().manual_seed(seed))


def logits(model, recipe, x):
    own = copy.deepcopy(model)
    halfstep.apply(own, recipe)
    with torch.no_grad():
        return own.eval()(x).double()


def test_figures_equal_separately_computed_log_probabilities():
    model, x = Causal(), [tokens(), tokens(seed=2)]
    before = copy.deepcopy(model.state_dict())
    found = halfstep.mismatch(model, x, "bf16-mixed", "fp8-current")
    q, p = (torch.cat([logits(model, recipe, each) for each in x]) for recipe in ("bf16-mixed", "fp8-current"))
    kl = kl_divergence(Categorical(logits=p), Categorical(logits=q))
    assert found.tokens == kl.numel() == 256
    assert found.kl == pytest.approx(float(kl.mean()), rel=1e-6)
    assert found.kl_most == pytest.approx(float(kl.max()), rel=1e-6)
    largest = float((q.log_softmax(-1) - p.log_softmax(-1)).abs().max())
    assert 0 < found.difference <= found.difference_most <= largest
    assert found.ratio_least < 1 < found.ratio_most
    expected = (p.softmax(-1) * (q.log_softmax(-1) - p.log_softmax(-1)).abs()).sum(-1)
    assert found.difference == pytest.approx(float(expected.mean()), rel=0.3)  # sampled tokens
    assert (found.clipped > 0) is (found.ratio_least < 0.8 or found.ratio_most > 1.2)
    assert halfstep.mismatch(model, x, "bf16-mixed", "fp8-current", clip=found.difference / 2).clipped > 0.4
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_first_differing_layer_is_named():
    model = Causal()
    served = copy.deepcopy(model)
    with torch.no_grad():
        served.blocks[1]["out"].weight[0, 0] += 0.5
    found = halfstep.mismatch(model, [tokens()], "fp32", served)
    assert found.begins == "blocks.1.out"
    assert found.layers["blocks.0.mlp"] == 0 < found.layers["unembed"]
    assert found.rollout == "Causal"
    assert "begins at blocks.1.out" in str(found)
    assert not any(module._forward_hooks for module in served.modules())


def test_equal_recipes_have_no_mismatch_and_fp16_less_than_bf16():
    model, x = Causal(), [tokens()]
    same = halfstep.mismatch(model, x, "bf16-mixed", "bf16-mixed")
    assert (same.kl_most, same.difference_most, same.ratio_least, same.ratio_most, same.begins) == (0, 0, 1, 1, None)
    assert "no module's output differs" in str(same)
    bf16, fp16 = (halfstep.mismatch(model, x, "fp32", recipe).kl for recipe in ("bf16-mixed", "fp16-mixed"))
    assert 20 * fp16 < bf16


ALONE = [{"rows": 1}, {"rows": 3}, {"padding": 5}, {"rows": 1, "padding": 9}]
SHARED = {"fp8-current", "fp8-delayed", "fp8-delayed-megatron", "nvfp4", "coat", "fp4-wang"}
"""Recipes that docs/mismatch.md names: rows of a call share a scale or a clamp."""
POWERS = {"fp8-amax", "fp8lm-o1", "fp8lm-o2", "fp8lm-o3"}
"""Recipes whose shared scale is a power of two, so that it changes little or nothing."""


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("names", fast_and_every(RECIPES, {"mxfp8", "fp8-rowwise", "fp8-current"}))
def test_recipes_are_batch_invariant_as_documented(names):
    """Over batch sizes and padding, up to the order of float32 sums, which depends on a call's shape."""
    model, x = Causal(), tokens(6, 12)
    model.wte.weight.data[0] *= 3
    x[1:][x[1:] == 0], x[0, 5:] = 1, 0  # one token in one row is larger than all others
    for recipe in names:
        apart = [halfstep.mismatch(model, [x], recipe, recipe, **how).difference_most for how in ALONE]
        assert (max(apart) > 1e-3) is (recipe in SHARED), (recipe, apart)
        assert recipe in SHARED or max(apart) < 1e-5, (recipe, apart)
        assert bool(get_recipe(recipe).shared_in_a_call) is (recipe in SHARED | POWERS)


def test_documentation_names_the_batch_dependent_recipes():
    page = (Path(__file__).parents[2] / "docs" / "mismatch.md").read_text().split("## Batch invariance")[1]
    named = [row for row in page.splitlines() if row.startswith("| `")]
    assert len(named) == 3
    shared = {name for name in list_recipes() if get_recipe(name).shared_in_a_call}
    assert set(re.findall(r"`([\w-]+)`", " ".join(row.split("|")[1] for row in named))) == shared


@pytest.mark.parametrize("recipe", sorted(SMOOTH))
def test_channel_scales_of_gated_mlps_are_shared_between_rows(recipe):
    model = nn.Sequential(nn.Embedding(48, 16), Gated(16), nn.Linear(16, 48))
    model[0].weight.data[0] *= 30
    x = tokens(6, 12)
    x[1:][x[1:] == 0], x[0, 5:] = 1, 0
    assert halfstep.mismatch(model, [x], recipe, recipe, rows=1).difference_most > 1e-4
    assert any("gated MLPs" in why for why in get_recipe(recipe).shared_in_a_call)


def test_batch_invariant_option_rejects_shared_scales():
    made = replace(get_recipe("fp8-rowwise"), name="mine", batch_invariant=True)
    assert "batch        no row's result depends on the other rows" in made.describe()
    with pytest.raises(RecipeError, match=r"batch_invariant, and rows of a call share input of linear '\*': current"):
        replace(get_recipe("fp8-current"), batch_invariant=True)
    late = {"name": "late", "base": "fp8-rowwise", "stages": [{"recipe": "fp8-current", "start": 0.5}]}
    assert from_data(late, get_recipe).shared_in_a_call
    with pytest.raises(RecipeError, match="batch_invariant, and rows of a call share"):
        from_data({**late, "batch_invariant": True}, get_recipe)
    model = nn.Linear(4, 4)
    halfstep.apply(model, "fp8-current")
    assert "batch: rows of a call share: input of linear" in str(halfstep.plan_of(model))


def test_masked_positions_are_not_counted():
    model, x = Wrapped(), tokens(2, 8)
    mask = torch.ones_like(x)
    mask[0, 3:] = 0
    found = halfstep.mismatch(model, [{"input_ids": x, "attention_mask": mask, "labels": x}], "fp32", "bf16-mixed")
    assert found.tokens == 11
    with pytest.raises(DataError, match="attention_mask takes out every position"):
        halfstep.mismatch(model, [{"input_ids": x, "attention_mask": 0 * mask}])


class Wrapped(nn.Module):
    """A model called as transformers' models are."""

    def __init__(self):
        super().__init__()
        self.inner = Causal()

    def forward(self, input_ids, attention_mask=None):
        return (self.inner(input_ids),)


@pytest.mark.parametrize(
    ("error", "message", "how"),
    [
        (RecipeError, "rows = 0", {"rows": 0}),
        (RecipeError, "clip = 1.5", {"clip": 1.5}),
        (RecipeError, "unknown recipe 'bf17'", {"train": "bf17"}),
        (DataError, "no batch given", {"batches": []}),
        (DataError, "expected tokens", {"batches": [torch.randn(2, 3)]}),
        (ModelError, "expected two models of one vocabulary", {"rollout": Causal(vocabulary=50)}),
        (DataError, "expected tokens", {"batches": [{"input": tokens()}]}),
        (ModelError, "expected logits of every position", {"model": nn.Sequential(nn.Embedding(48, 8), nn.Flatten())}),
    ],
)
def test_bad_arguments_raise(error, message, how):
    with pytest.raises(error, match=message):
        halfstep.mismatch(**{"model": Causal(), "batches": [tokens()], **how})


OWN = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.wte, self.up, self.unembed = nn.Embedding(256, 32), nn.Linear(32, 64), nn.Linear(64, 256)

    def forward(self, tokens):
        return self.unembed(self.up(self.wte(tokens)).relu())

def policy():
    return Model()
"""


def test_mismatch_command(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "text.txt").write_text("to be, or not to be: " * 400)
    small = ["own.py:policy", "--batches", "1", "--context", "16", "--data", "text.txt"]
    code, out, _ = run("mismatch", *small, "--train", "bf16-mixed", "--rollout", "fp8-current")
    assert code == 1
    assert "Model: trained under bf16-mixed, generates under fp8-current; 64 tokens" in out
    assert "begins at up" in out
    code, out, _ = run("mismatch", *small, "--train", "mxfp8", "--rows", "1", "--json")
    data = json.loads(out)
    assert (code, data["kl"], data["rollout"]) == (0, 0, "mxfp8, 1 row a call")
    code, _, errors = run("mismatch", *small, "--rollout", "fp32", "--exported", "here")
    assert code == 2
    assert "--rollout and --exported both given" in errors


@pytest.mark.slow
def test_mismatch_with_an_exported_folder(run, tmp_path):
    hf = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=64, **sizes)).save_pretrained(tmp_path / "policy")
    assert run("export", str(tmp_path / "policy"), str(tmp_path / "served"), "--recipe", "fp8-rowwise")[0] == 0
    words = [str(tmp_path / "policy"), "--batches", "1", "--context", "16", "--json"]
    found = [
        json.loads(run("mismatch", *words, "--train", train, "--exported", str(tmp_path / "served"))[1])
        for train in ("fp32", "fp8-rowwise")
    ]
    assert found[0]["kl"] > 0
    assert found[1]["kl"] < found[0]["kl"] / 100
