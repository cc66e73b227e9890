"""`halfstep.cached_weights`: weights quantized once for several forwards give the same bits, and are never stale."""

import copy
import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import halfstep
from halfstep import formats, ops
from halfstep.errors import ModelError, RecipeError
from halfstep.nn.product import CachedWeights, _bits
from halfstep.quant import Hadamard
from halfstep.recipe import LinearSpec
from tiny import assert_same, batch, grads, prepared


MICRO = 3


def steps(name, cached, count=2, model=None, forward=None, then=None):
    """The gradients and weights of `count` steps of several micro-batches, and the caches."""
    model, optimizer, scaler = prepared(name, model)
    found, caches = [], []
    for _ in range(count):
        with halfstep.cached_weights(model) if cached else torch.enable_grad() as cache:
            for i in range(MICRO):
                x, y = batch(seed=i)
                out = model(x) if forward is None else forward(model, x)
                scaler.scale(F.mse_loss(out, y)).backward()
        found.append(grads(model))
        caches.append(cache)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if then is not None:
            then(model)
    return [*found, dict(model.state_dict())], caches


@pytest.mark.parametrize("name", ["fp8-current", "fp8-delayed", "nvfp4", "coat", "fp8-block"])
def test_micro_batches_give_the_same_bits(name):
    plain, _ = steps(name, cached=False)
    found, caches = steps(name, cached=True)
    assert_same(found, plain)
    assert [(cache.rounded, cache.used) for cache in caches] == [(2, 2 * MICRO)] * 2


@pytest.fixture
def roundings(monkeypatch):
    """The shapes of all matmul operands that are quantized, in order of the calls."""
    seen, real = [], sys.modules["halfstep.ops.operand"].operand

    def counted(x, *args, **kwargs):
        seen.append(tuple(x.shape))
        return real(x, *args, **kwargs)

    for name in ("linear", "linear_passes", "operand", "sides"):
        monkeypatch.setattr(sys.modules[f"halfstep.ops.{name}"], "operand", counted, raising=False)
    return seen


def test_a_cached_weight_is_quantized_once_per_step(roundings):
    model, _, _ = prepared("mxfp8", nn.Linear(48, 32, bias=False))
    counts = []
    for cached in (False, True):
        roundings.clear()
        with halfstep.cached_weights(model) if cached else torch.enable_grad() as cache:
            for _ in range(MICRO):
                model(torch.randn(16, 48, requires_grad=True)).sum().backward()
        counts.append(roundings.count((32, 48)))
    assert counts == [2 * MICRO, 2]  # along its rows, and along its columns
    assert (cache.rounded, cache.used) == (1, MICRO)
    assert cache.nbytes in (2 * 2 * 32 * 48, 2 * 4 * 32 * 48)  # bf16 values for two matmuls; float32 without AVX-512
    assert str(cache) == "1 roundings of weights for 3 products; they took 0.0 MiB at most"


def test_evaluation_caches_only_the_forward_operand(roundings):
    model, _, _ = prepared("mxfp8", nn.Linear(48, 32, bias=False))
    model.eval()
    x = torch.randn(16, 48)
    with torch.no_grad():
        expected = model(x)
        roundings.clear()
        with halfstep.cached_weights(model) as cache:
            assert all(torch.equal(model(x), expected) for _ in range(MICRO))
    assert roundings.count((32, 48)) == 1
    assert cache.nbytes in (2 * 32 * 48, 4 * 32 * 48)


@pytest.mark.parametrize(
    ("name", "gradients", "training"),
    [("fp8-delayed", False, True), ("fp8-delayed", True, True), ("mxfp8", False, True), ("mxfp8", False, False)],
)
def test_evaluation_before_training_in_one_context_gives_the_same_bits(name, gradients, training):
    """Weights cached without gradients are not reused with them, and the step's amax is recorded."""

    def both(model, x):
        model.eval()
        with torch.set_grad_enabled(gradients):
            model(x)
        model.train(training)
        return model(x)

    assert_same(steps(name, True, forward=both)[0], steps(name, False, forward=both)[0])


@pytest.mark.parametrize("name", ["fp8-delayed", "coat"])
def test_cached_weights_under_checkpointing_give_the_same_bits(name):
    def again(model, x):
        return checkpoint(model, x, use_reentrant=False)

    assert_same(steps(name, True, forward=again)[0], steps(name, False, forward=again)[0])


def test_views_of_a_parameter_are_cached():
    """Slices of one parameter for three attention projections, and the transposed weight of transformers' Conv1D."""
    transformers = pytest.importorskip("transformers")

    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(5)
            self.enter = transformers.pytorch_utils.Conv1D(16, 8)
            self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
            self.leave = nn.Linear(16, 4)

        def forward(self, x):
            x = self.enter(x)[None]
            x, _ = self.attention(x, x + 1, x + 1, need_weights=False)
            return self.leave(x[0])

    plain, _ = steps("fp8-current", False, model=Attends())
    found, caches = steps("fp8-current", True, model=Attends())
    assert_same(found, plain)
    assert [(cache.rounded, cache.used) for cache in caches] == [(6, 6 * MICRO)] * 2


# ---- weights that change within the context ----------------------------------------------------------------------


def check_after_write(write, name="fp8-current"):
    """Compare the outputs before and after `write` within the context with those outside of it."""
    outputs = []
    for cached in (False, True):
        model, optimizer, scaler = prepared(name)
        x, y = batch()
        with halfstep.cached_weights(model) if cached else torch.enable_grad() as cache:
            first = model(x)
            scaler.scale(F.mse_loss(first, y)).backward()
            write(model, optimizer, scaler, cache)
            outputs.append((first.detach(), model(x).detach()))
    assert not torch.equal(*outputs[0])
    assert_same(outputs[1], outputs[0])


def test_an_optimizer_step_within_the_context_refreshes_the_cache():
    def step(model, optimizer, scaler, cache):
        scaler.step(optimizer)
        scaler.update()

    check_after_write(step)
    check_after_write(step, "fp8-delayed")


def test_an_optimizer_that_writes_through_data_refreshes_the_cache():
    """Writes through .data do not raise a tensor's version counter."""

    class Plain(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    p.data.sub_(p.grad.data)

    def step(model, optimizer, scaler, cache):
        Plain(model.parameters(), lr=1.0).step()

    check_after_write(step)


def test_scales_that_change_without_a_step_refresh_the_cache():
    """As in scaler.update() after a backward pass without a step."""
    outputs = []
    for cached in (False, True):
        model, _, scaler = prepared("fp8-delayed")
        with halfstep.cached_weights(model) if cached else torch.enable_grad():
            first = model(batch()[0])
            first.sum().backward()
            with torch.no_grad():  # an amax that changes the scale
                for state in (b for name, b in model.named_buffers() if name.endswith("weight")):
                    state[1].mul_(3.3)
            scaler.update()
            outputs.append((first.detach(), model(batch()[0]).detach()))
    assert not torch.equal(*outputs[0])
    assert_same(outputs[1], outputs[0])


@pytest.mark.parametrize("write", ["in place", "copy", "data is set", "data is set twice", "a new parameter"])
def test_a_write_that_raises_the_version_counter_refreshes_the_cache(write):
    def do(model, optimizer, scaler, cache):
        with torch.no_grad():
            if write == "in place":
                model[0].weight.mul_(1.5)
            elif write == "copy":
                model[0].weight.copy_(model[0].weight * 1.5)
            elif write == "data is set":
                model[0].weight.data = model[0].weight.data * 1.5
            elif write == "data is set twice":  # the second may get the storage that the first one freed
                for _ in range(2):
                    model[0].weight.data = model[0].weight.data * 1.5
            else:
                model[0].weight = nn.Parameter(model[0].weight * 1.5)

    check_after_write(do)


def through_data(model):
    model[0].weight.data[1, 1] += 1  # not among the sampled values that every matmul compares


def test_swapping_an_average_in_and_out_through_data_refreshes_the_cache():
    """As evaluations of averaged weights do it: the weights at the end equal those at the start."""
    outputs = []
    for cached in (False, True):
        model, _, _ = prepared("fp8-current")
        average = [p.detach() * 0.5 for p in model.parameters()]
        with halfstep.cached_weights(model) if cached else torch.enable_grad(), torch.no_grad():
            outputs.append([model(batch()[0])])
            kept = [p.detach().clone() for p in model.parameters()]
            for values in (average, kept):
                for p, other in zip(model.parameters(), values, strict=True):
                    p.data.copy_(other)
                outputs[-1].append(model(batch()[0]))
    assert_same(*outputs)
    assert not torch.equal(*outputs[0][:2])


def test_single_values_written_through_data_raise_an_error():
    model, optimizer, _ = prepared("fp8-current")
    inside, said = halfstep.cached_weights(model), r"weights of shapes \[\(16, 8\)\] were written to .* \.clear\(\)"
    inside.__enter__()
    model(batch()[0]).sum().backward()
    through_data(model)
    with pytest.raises(ModelError, match=said):
        inside.__exit__(None, None, None)
    model(batch()[0])  # works again outside of the context

    with halfstep.cached_weights(model):
        model(batch()[0]).sum().backward()
        through_data(model)
        before = model[0].weight.clone()
        with pytest.raises(ModelError, match=r"within halfstep\.cached_weights"):
            optimizer.step()
        assert torch.equal(model[0].weight, before)
        model._halfstep.following.cached.clear()


def test_another_stage_of_the_recipe_refreshes_the_cache():
    """`nn.stages` may change a layer's quantizers between forwards."""

    def stage(model, optimizer, scaler, cache):
        spec = model[0]._halfstep.linear
        coarser = replace(spec.output.rhs, format=formats.get("e5m2"))
        model[0]._halfstep.linear = replace(spec, output=replace(spec.output, rhs=coarser))

    check_after_write(stage)


def test_clear_refreshes_the_cache():
    def write(model, optimizer, scaler, cache):
        through_data(model)
        if cache is not None:
            cache.clear()

    check_after_write(write)


# ---- where no weight can be cached -------------------------------------------------------------------------------


def test_weights_rounded_stochastically_or_with_random_signs_are_not_cached():
    spec = next(rule.linear for rule in halfstep.get_recipe("nvfp4").rules if rule.linear.rounds)
    assert spec.rounds_weight_once
    assert not LinearSpec().rounds_weight_once
    for which in ("output", "grad_input"):
        product = getattr(spec, which)
        noisy = replace(product, rhs=replace(product.rhs, rounding="stochastic"))
        drawn = replace(product, hadamard=Hadamard(16, seed="random"))
        assert not replace(spec, **{which: noisy}).rounds_weight_once
        assert not replace(spec, **{which: drawn}).rounds_weight_once


def test_a_model_without_a_recipe_is_refused():
    with pytest.raises(RecipeError, match="recipe"), halfstep.cached_weights(nn.Linear(2, 2)):
        pass


def test_a_sharded_model_is_refused(tmp_path):
    """FSDP2 frees gathered weights between forwards, but cached ones would stay unsharded."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
        halfstep.apply(model, "fp8-current")
        fully_shard(model[0])
        with pytest.raises(ModelError, match="is sharded by fully_shard"), halfstep.cached_weights(model):
            pass
    finally:
        torch.distributed.destroy_process_group()


def test_a_recipe_that_quantizes_no_weight_caches_nothing_silently(recwarn):
    model, _, _ = prepared("bf16-mixed")
    with halfstep.cached_weights(model) as cache:
        model(batch()[0])
    assert (cache.rounded, cache.nbytes, len(recwarn)) == (0, 0, 0)


def test_weights_stored_as_codes_are_not_cached_with_a_warning():
    model, _, _ = prepared("fp4-wang")
    with pytest.warns(UserWarning, match="computed in each forward"), halfstep.cached_weights(model):
        model(batch()[0])


def test_a_compiled_model_stays_one_graph_and_warns_that_nothing_was_cached():
    model, _, _ = prepared("fp8-current")
    torch.compiler.reset()  # beyond torch's recompile limit a layer runs eagerly
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    said = pytest.warns(UserWarning, match=r"no weight was rounded within halfstep\.cached_weights")
    with said, halfstep.cached_weights(model), torch.no_grad():
        compiled(batch()[0])


def test_nested_contexts_share_a_cache_and_copies_of_the_model_have_none():
    model, _, _ = prepared("fp8-current")
    with halfstep.cached_weights(model) as outer:
        model(batch()[0])
        with halfstep.cached_weights(model) as inner:
            model(batch()[0])
        assert inner is outer
        assert (outer.rounded, outer.used) == (2, 4)
        clone = copy.deepcopy(model)
        clone(batch()[0])
        assert outer.used == 4
    assert model._halfstep.following.cached is None


def test_a_frozen_weight_is_cached():
    """As a base weight under LoRA, which takes no gradient."""
    model, _, _ = prepared("fp8-current")
    model[0].weight.requires_grad_(False)
    with halfstep.cached_weights(model) as cache:
        for _ in range(MICRO):
            model(batch()[0]).sum().backward()
    assert cache.rounded == 2
    assert model[0].weight.grad is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(3,), (5, 3), (16, 8)])
def test_the_checksum_of_a_weight_depends_on_every_element(dtype, shape):
    weight = nn.Parameter(torch.randn(7 + 200).to(dtype)[3 : 3 + ops.values_of(torch.empty(shape)).numel()].view(shape))
    before = _bits(weight)
    for i in range(weight.numel()):
        kept = weight.data.view(-1)[i].clone()
        for new in (-kept, kept * 2, kept + 1):
            weight.data.view(-1)[i] = new
            assert _bits(weight) != before
        weight.data.view(-1)[i] = kept
    assert _bits(weight) == before


@pytest.fixture
def as_on_gpu(monkeypatch):
    """Make the cache treat samples of weights as if they were on a GPU, whose values the host does not wait for."""
    real = CachedWeights._stays
    on_gpu = lambda self, entry: real(self, entry._replace(sample=OnGpu(entry.sample)))  # noqa: E731
    monkeypatch.setattr(CachedWeights, "_stays", on_gpu)


def test_a_write_through_data_on_a_gpu_is_an_error_at_the_step(as_on_gpu):
    model, optimizer, _ = prepared("fp8-current")
    with halfstep.cached_weights(model), torch.no_grad():
        model(batch()[0])
        kept = model[0].weight.detach().clone()
        model[0].weight.data.mul_(2)
        model(batch()[0])
        model[0].weight.data.copy_(kept)
        with pytest.raises(ModelError, match="weights were written to within"):
            optimizer.step()
        model._halfstep.following.cached.clear()


@pytest.mark.parametrize("write", ["in place", "copy", "data is set", "a new parameter"])
def test_writes_that_raise_the_version_counter_are_no_error_on_a_gpu(as_on_gpu, write):
    test_a_write_that_raises_the_version_counter_refreshes_the_cache(write)


class OnGpu:
    """A tensor whose is_cpu and device are those of a GPU's."""

    is_cpu, device = False, torch.device("cuda")

    def __init__(self, tensor):
        self.tensor = tensor

    def __ne__(self, other):
        return self.tensor != other
