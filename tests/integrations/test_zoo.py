"""Twelve Hugging Face models under the recipes that round matmuls: each trains, differs from bf16-mixed, reloads."""

import pytest
import torch
from torch import nn
from zoo import MEMBERS

import halfstep
from halfstep.errors import RecipeError
from halfstep.nn.adapters import experts
from halfstep.recipe import get_recipe
from halfstep.recipe.operands import KEEP
from tiny import EVERY, SMOOTH, assert_same, descend


LOW = [name for name in EVERY if set(KEEP) <= set(get_recipe(name).rules)]
BY_DEPTH = [name for name in LOW if any(rule.blocks for rule in get_recipe(name).rules)]  # these need a single stack


def misfit(member, name):
    """The error text for a model that does not support the recipe, or None."""
    if name in SMOOTH and not member.gated:
        return "smooths gated MLPs"
    return "several stacks of them" if name in BY_DEPTH and member.config.is_encoder_decoder else None


PAIRS = [(m, r) for m, member in MEMBERS.items() for r in LOW if misfit(member, r) is None]
ALIKE = {"mistral", "qwen3", "roberta"}  # modules like those of llama and bert
FEW = [(m, LOW[i % len(LOW)]) for i, m in enumerate(MEMBERS)]
FEW = [(m, r if (m, r) in PAIRS else "fp8-delayed") for m, r in FEW if m not in ALIKE] + [("llama", r) for r in SMOOTH]
REST = [pair for pair in PAIRS if pair not in FEW]
every_model = pytest.mark.parametrize("kind", MEMBERS)


def run(kind, name, steps=6):
    """The losses and the trained model."""
    member = MEMBERS[kind]
    model = member.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    model, optimizer, scaler = halfstep.prepare(model, optimizer, recipe=name, generator=3)
    torch.manual_seed(2)  # dropout
    return descend(lambda: model(**member.batch()).loss, optimizer, scaler, steps), model


def check(kind, name, folder):
    member = MEMBERS[kind]
    losses, model = run(kind, name)
    assert torch.tensor(losses).isfinite().all()
    assert min(losses[-2:]) < losses[0] - 0.1
    assert losses[:2] != run(kind, "bf16-mixed", 2)[0], "the recipe did nothing"
    assert list(model.state_dict()) == list(member.build().state_dict())
    model.save_pretrained(folder)
    loaded = member.kind.from_pretrained(folder, dtype=torch.float32)
    assert type(loaded) is member.kind
    halfstep.revert(model)
    assert [type(m) for m in model.modules()] == [type(m) for m in loaded.modules()]
    with torch.no_grad():
        expected = model.eval()(**member.batch()).logits
        assert_same(loaded.eval()(**member.batch()).logits, expected)


@pytest.mark.quick("gpt2-fp8-block", "mixtral-mxfp4-rht")
@pytest.mark.parametrize(("kind", "name"), FEW)
def test_some_models_train_differ_and_reload(kind, name, tmp_path):
    check(kind, name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), REST)
def test_other_models_train_differ_and_reload(kind, name, tmp_path):
    check(kind, name, tmp_path)


@pytest.mark.quick("llama", "gpt2", "mixtral", "opt")
@every_model
def test_only_heads_and_routers_are_kept(kind):
    """Except convolutions under rotations, and the last of two blocks where a rule keeps 15% of them unrounded."""
    model = MEMBERS[kind].build()
    products = [
        path
        for path, module in model.named_modules()
        if isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d))
        or type(module).__name__ == "Conv1D"
        or experts.resembles(module)
    ]
    for name in LOW:
        if (why := misfit(MEMBERS[kind], name)) is not None:
            with pytest.raises(RecipeError, match=why):
                halfstep.apply(model, name)
            continue
        report = halfstep.apply(model, name)
        kept = {path for path, why in report.kept.items() if why in ("output head", "router")}
        assert kept == set(MEMBERS[kind].kept)
        if get_recipe(name).rules[-1].linear.rotates:
            kept |= {p for p in products if isinstance(model.get_submodule(p), (nn.Conv1d, nn.Conv2d))}
        if name in BY_DEPTH:
            last = {p for p in products if "1" in p.split(".")} - kept
            assert last
            assert last == {p for p, why in report.kept.items() if why == "last blocks"}
            kept |= last
        assert set(report.quantized) == set(products) - kept
        halfstep.revert(model)
