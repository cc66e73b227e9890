"""`halfstep.unit_scale`: sizes at initialisation, true gradients, refusals, and copies, checkpointing and recipes."""

import copy
import io
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import halfstep
from families import in_turn, slow_unless
from halfstep.errors import ModelError, RecipeError
from halfstep.lab.models.gpt import GPT
from halfstep.lab.models.llama import Llama
from halfstep.lab.models.seq2seq import Seq2Seq
from halfstep.lab.tasks.vision import CNN
from halfstep.nn.unit.graph import _bridges
from tiny import UNIT
from unit_scaled import off_direction, passes, sizes


TOKENS = torch.randint(0, 97, (8, 32), generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(32, 1, 8, 8, generator=torch.Generator().manual_seed(0))
MODELS = {
    "gpt": (lambda: GPT(97, 32, 2, 64, 4), (TOKENS,)),
    "llama": (lambda: Llama(97, 32, 2, 64, 4), (TOKENS,)),
    "seq2seq": (lambda: Seq2Seq(97, 97, 32, 1, 64, 4), (TOKENS, TOKENS.flip(0))),
    "cnn": (lambda: CNN(10, 16), (IMAGES,)),
}
every_model = pytest.mark.parametrize("name", MODELS)


def unit_scaled(name, smooth=False, **options):
    """A unit-scaled model of that name. `smooth` replaces ReLUs by GELUs, so that differences of outputs are slopes."""
    torch.manual_seed(0)
    make, inputs = MODELS[name]
    model = make()
    for module in model.modules():
        for part, child in module.named_children():
            if smooth and isinstance(child, nn.ReLU):
                setattr(module, part, nn.GELU())
    report = halfstep.unit_scale(model, *inputs, **options)
    return model, inputs, report


@every_model
def test_standard_deviations_are_near_1_at_initialisation(name):
    model, inputs, _ = unit_scaled(name)
    weights = {path: float(p.detach().std(correction=0)) for path, p in model.named_parameters() if p.dim() > 1}
    assert all(abs(size - 1) < 1e-5 for size in weights.values()), weights
    for found in sizes(model, inputs, {}):
        assert found
        assert all(1 / 3 <= size <= 3 for size in found.values()), found
        within = sum(0.5 <= size <= 2 for size in found.values())
        assert within >= 0.7 * len(found), found


CONSTRAINTS = ("geometric_mean", "to_output", "to_grad_input")


@pytest.mark.quick("cnn-geometric_mean")
@pytest.mark.parametrize(
    ("name", "constraint"),
    slow_unless(in_turn([*MODELS], CONSTRAINTS).__contains__, itertools.product(MODELS, CONSTRAINTS)),
)
def test_gradients_are_multiples_of_the_true_ones(name, constraint):
    model, inputs, _ = unit_scaled(name, constraint=constraint, smooth=True)
    inputs = [x.double() if x.is_floating_point() else x for x in inputs]
    found = off_direction(model.double(), inputs, {})
    assert max(found.values()) < 1e-6, found


def test_gradients_without_a_constraint_are_not_multiples_of_the_true_ones():
    model, inputs, _ = unit_scaled("gpt", constraint=None)
    found = off_direction(model.double(), inputs, {})
    assert max(found.values()) > 1e-3
    assert found["head.weight"] < 1e-6


def test_residual_shares_are_those_of_a_running_mean():
    _, _, report = unit_scaled("gpt")
    shares = [op.rule for op in report.operations if op.rule.startswith("residual")]
    assert [rule.split("branch ")[1].split(";")[0] for rule in shares] == ["0.5", "0.333", "0.25", "0.2"]
    _, _, fixed = unit_scaled("gpt", residual=0.3)
    assert all("share of the branch 0.3;" in op.rule for op in fixed.operations if op.rule.startswith("residual"))


class Skip(nn.Module):
    """Three layers and a residual connection, as in the paper's figure."""

    def __init__(self):
        super().__init__()
        self.first, self.branch, self.last = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 8)

    def forward(self, x):
        x = self.first(x)
        return self.last(x + torch.tanh(self.branch(x)))


def test_only_layers_in_the_residual_branch_tie_their_factors():
    torch.manual_seed(0)
    model = Skip()
    report = halfstep.unit_scale(model, torch.randn(64, 16))
    tied = {op.path: op.tied for op in report.operations if op.name == "nn.Linear"}
    assert tied == {"first": False, "branch": True, "last": False}
    factors = {op.path: op.backward[0] for op in report.operations if op.name == "nn.Linear"}
    assert factors["last"] == pytest.approx(8**-0.5)
    assert factors["branch"] == pytest.approx(32**-0.5 * 0.5**0.5 / _size_of_tanh(), rel=1e-3)


class SharedDropout(Skip):
    """The branch and the code around it use one dropout module."""

    def __init__(self, begins):
        super().__init__()
        self.drop, self.begins = nn.Dropout(0.1), begins

    def forward(self, x):
        x = self.first(x)
        branch = self.branch(self.drop(x) if self.begins else x)
        return self.last(self.drop(x + self.drop(branch)))


def test_a_branch_may_share_a_module_with_the_code_around_it():
    reports = [halfstep.unit_scale(SharedDropout(begins), torch.randn(64, 16)) for begins in (False, True)]
    shares = [[op.rule[:33] for op in report.operations if op.rule.startswith("residual")] for report in reports]
    assert shares == [["residual, share of the branch 0.5"]] * 2


def _size_of_tanh():
    """The size of the branch's output: tanh's two tied factors times its output's root mean square."""
    z = torch.randn(10**6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y, slope = z.tanh(), 1 - z.tanh() ** 2
    alpha = (y.std() * slope.square().mean().sqrt()) ** -0.5
    return float(alpha * y.square().mean().sqrt())


def components(size, ends):
    """The number of connected components of a graph."""
    group = list(range(size))
    for u, v in ends:
        group = [group[u] if g == group[v] else g for g in group]
    return len(set(group))


def test_bridges_are_the_edges_whose_removal_disconnects_the_graph():
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        size = 7
        ends = [tuple(sorted(pair)) for pair in torch.randint(0, size, (3, 2), generator=generator).tolist()]
        first = [int(torch.randint(u + 1, size, (), generator=generator)) for u in range(size - 1)]
        ends = [(u, v) for u, v in [*enumerate(first), *ends] if u != v]
        ends = [ends[i] for i in torch.randperm(len(ends), generator=generator).tolist()]

        expected = [i for i in range(len(ends)) if components(size, ends[:i] + ends[i + 1 :]) > components(size, ends)]
        assert sorted(_bridges(ends)) == expected


@pytest.mark.quick("seq2seq", "cnn")
@every_model
def test_copied_pickled_and_resumed_models_give_the_same_bits(name):
    model, inputs, _ = unit_scaled(name)
    output, grads = passes(model, inputs, {})
    file = io.BytesIO()
    torch.save(copy.deepcopy(model), file)
    file.seek(0)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    torch.manual_seed(7)
    resumed = MODELS[name][0]()
    halfstep.unit_scale(resumed, *inputs)
    resumed.load_state_dict(state)
    for other in (torch.load(file, weights_only=False), resumed):
        again, found = passes(other, inputs, {})
        assert torch.equal(again, output)
        assert all(torch.equal(grad, found[key]) for key, grad in grads.items())


def test_loading_the_weights_of_a_plain_model_warns():
    torch.manual_seed(0)
    model = GPT(97, 32, 1, 32, 2)
    plain = copy.deepcopy(model.state_dict())
    halfstep.unit_scale(model, TOKENS)
    with pytest.warns(UserWarning, match=r"unit-scaled, and 7 of its 7 weights \(token.weight ...\) were loaded"):
        model.load_state_dict(plain)
    halfstep.revert(model)
    model.load_state_dict(plain)
    halfstep.unit_scale(model, TOKENS)
    for copied in (model, copy.deepcopy(model), torch.load(_saved(model), weights_only=False)):
        copied.load_state_dict(copy.deepcopy(model.state_dict()))  # no warning, which is an error here


def _saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return file


@every_model
def test_revert_restores_classes_keys_and_weights(name):
    torch.manual_seed(0)
    stock = MODELS[name][0]()
    model, _, _ = unit_scaled(name)
    assert list(model.state_dict()) == list(stock.state_dict())
    assert all(isinstance(m, type(s)) for m, s in zip(model.modules(), stock.modules(), strict=True))
    halfstep.apply(model, "unit-fp16")
    halfstep.revert(model)
    halfstep.apply(model, "bf16-mixed")
    halfstep.revert(model)
    halfstep.revert(model)
    assert all(type(m) is type(s) for m, s in zip(model.modules(), stock.modules(), strict=True))
    assert not [key for module in model.modules() for key in vars(module) if key.startswith("_halfstep")]
    for parameter, original in zip(model.parameters(), stock.parameters(), strict=True):
        assert torch.allclose(parameter, original, rtol=1e-6, atol=0)
    with pytest.raises(RecipeError, match="follows no recipe"):
        halfstep.revert(model)


@every_model
def test_tracing_changes_no_buffer_mode_gradient_or_random_state(name):
    torch.manual_seed(0)
    model = MODELS[name][0]().eval()
    buffers = {key: value.clone() for key, value in model.named_buffers()}
    random = torch.get_rng_state()
    halfstep.unit_scale(model, *MODELS[name][1])
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, buffers[key]) for key, value in model.named_buffers())
    assert not any(module.training for module in model.modules())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch does, as it traces
@pytest.mark.slow  # functions are traced in tests/unit, and a model in test_unit_ways.py
@every_model
def test_a_traced_graph_matches_eager(name):
    model, inputs, _ = unit_scaled(name)
    output, grads = passes(model, inputs, {})
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    again, found = passes(compiled, inputs, {})
    assert torch.allclose(again, output, rtol=1e-5, atol=1e-5)
    for key, grad in grads.items():
        assert torch.allclose(found[f"_orig_mod.{key}"], grad, rtol=1e-4, atol=1e-4 * float(grad.abs().max())), key


class Checkpointed(nn.Module):
    """A GPT whose blocks are checkpointed."""

    def __init__(self, model, reentrant):
        super().__init__()
        self.model, self.reentrant = model, reentrant

    def forward(self, tokens):
        x = self.model.token(tokens) + self.model.position(torch.arange(tokens.shape[1]))
        for block in self.model.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.model.head(self.model.norm(x))


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_changes_no_bit(reentrant):
    found = []
    for kind in (lambda model: Checkpointed(model, reentrant), lambda model: model):
        torch.manual_seed(0)
        model = kind(GPT(97, 32, 2, 64, 4))
        halfstep.unit_scale(model, TOKENS)
        found.append(passes(model, (TOKENS,), {}))
    (output, grads), (plain, expected) = found
    assert torch.equal(output, plain)
    assert all(torch.equal(grads[f"model.{key}"], grad) for key, grad in expected.items())


@pytest.mark.slow
@pytest.mark.parametrize("recipe", UNIT)
def test_a_unit_scaled_model_trains_without_a_loss_scale(recipe):
    def loss(output):
        return F.cross_entropy(output.flatten(0, 1).float(), TOKENS.flatten())

    model, _, _ = unit_scaled("gpt", loss=loss)
    model, optimizer, scaler = halfstep.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.02), recipe)
    losses = []
    for step in range(25):
        value = loss(model(TOKENS))
        scaler.scale(value).backward()
        if step == 0:
            seen = {name: float(p.grad.square().mean().sqrt()) for name, p in model.named_parameters() if p.dim() > 1}
            assert all(1 / 3 <= size <= 3 for size in seen.values()), seen
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(float(value.detach()))
    assert scaler.get_scale() == 1
    assert losses[-1] < 0.5 * losses[0], losses


@pytest.mark.parametrize("recipe", UNIT)
def test_unit_recipes_refuse_a_model_that_is_not_unit_scaled(recipe):
    model = GPT(97, 32, 1, 32, 2)
    with pytest.raises(ModelError, match=r"not unit-scaled: call halfstep.unit_scale"):
        halfstep.apply(model, recipe)
    assert type(model) is GPT


class Odd(nn.Module):
    """A residual branch with an unknown operation."""

    def __init__(self, function):
        super().__init__()
        self.first, self.inner, self.function = nn.Linear(8, 8), nn.Linear(8, 8), function

    def forward(self, x):
        x = self.first(x)
        return x + self.function(self.inner(x))


@pytest.mark.parametrize("function", [torch.exp, lambda x: x**2, lambda x: torch.cumsum(x, -1)])
def test_a_residual_branch_of_unknown_size_is_refused(function):
    model = nn.Sequential(Odd(function))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(ModelError, match=r"Sequential: 0: add is a residual addition whose branch comes from 0: "):
        halfstep.unit_scale(model, torch.randn(4, 8))
    assert type(model[0]) is Odd
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_an_unknown_operation_outside_branches_is_reported():
    model = nn.Sequential(nn.Linear(8, 8), nn.MaxPool1d(2), nn.Linear(4, 4))
    report = halfstep.unit_scale(model, torch.randn(16, 8))
    assert report.unseen == ("1: max_pool1d",)
    assert "not known, left alone: 1: max_pool1d" in str(report)


def test_a_forward_that_differs_from_the_traced_one_is_an_error():
    class Forked(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x, more=False):
            x = self.first(x)
            y = x + self.second(x)
            return y + x if more else y

    model = Forked()
    halfstep.unit_scale(model, torch.randn(4, 8))
    model(torch.randn(4, 8))
    with pytest.raises(ModelError, match=r"computes otherwise than when halfstep\.unit_scale traced it"):
        model(torch.randn(4, 8), more=True)
    halfstep.revert(model)
    halfstep.unit_scale(model, torch.randn(4, 8), more=True)
    with pytest.raises(ModelError, match="it ended where the trace has add"):
        model(torch.randn(4, 8))


def test_invalid_arguments_and_models_are_refused():
    model = GPT(97, 32, 1, 32, 2)
    with pytest.raises(ModelError, match="give it a batch"):
        halfstep.unit_scale(model)
    with pytest.raises(ModelError, match="share of variance between 0 and 1"):
        halfstep.unit_scale(model, TOKENS, residual=1.0)
    with pytest.raises(ModelError, match="wraps a model"):
        halfstep.unit_scale(torch.compile(model, backend="eager"), TOKENS)
    with pytest.raises(ModelError, match="unknown constraint"):
        halfstep.unit_scale(model, TOKENS, constraint="geometric-mean")
    nn.init.zeros_(model.blocks[0].mlp[2].weight)
    with pytest.raises(ModelError, match=r"blocks.0.mlp.2.weight .* standard deviation of 0.0"):
        halfstep.unit_scale(model, TOKENS)
    assert type(model) is GPT
    nn.init.normal_(model.blocks[0].mlp[2].weight)
    halfstep.apply(model, "bf16-mixed")
    with pytest.raises(RecipeError, match="follows a recipe"):
        halfstep.unit_scale(model, TOKENS)
    halfstep.revert(model)
    halfstep.unit_scale(model, TOKENS)
    with pytest.raises(RecipeError, match="is unit-scaled already"):
        halfstep.unit_scale(model, TOKENS)
    with pytest.raises(RecipeError, match="without float32_functions"):
        halfstep.apply(model, "fp16-lists")
