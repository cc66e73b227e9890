"""Moments in any format, with scales and residuals: each step equals float32's, with the moments rounded in between."""

import copy
import io
import itertools
import re
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

import halfstep
from families import in_turn, slow_unless
from halfstep import formats
from halfstep.errors import OptimizerError, RecipeError
from halfstep.memory import measure
from halfstep.optim import Lamb, Lion
from halfstep.optim.rules import no_fused_update
from halfstep.quant import Quantizer, Scales, Tile
from halfstep.quant.scaling import get_scaling
from halfstep.quant.tile import TENSOR
from halfstep.recipe import Storage, from_data, get_recipe, get_storage, to_data
from halfstep.tracking.step import vanished_states
from tiny import adamw, assert_same, batch, copied, mlp, nameless, prepared, train


CUSTOM = """
name = "custom"
base = "fp8-delayed"

[codes]                         # the weights that rules round, with an fp16 master
weights = {format = "e4m3fn", tile = "tensor", scale = "rceil"}
grads = {format = "e4m3fn", tile = "tensor", scale = "rceil"}
master = "fp16"

[moments]
exp_avg = "mxfp8_e4m3"
exp_avg_sq = {format = "bf16", residual = true}
"""
KINDS = {
    "blocks": (("exp_avg", "mxfp8_e4m3"), ("exp_avg_sq", get_storage("bf16", residual=True))),
    "tensor": (("*", get_storage(Quantizer(formats.get("e5m2"), scales=Scales(TENSOR, get_scaling("current"))))),),
    "no scale": (("*", "e5m2"),),
    "expansion": (("*", Quantizer(formats.get("e4m3fn"), scales=Scales(Tile(1, 16), get_scaling("expansion")))),),
    "codes twice": (("exp_avg", "nf4"), ("*", get_storage("mxfp8_e4m3", residual=True))),
    "packed": (("*", "mxfp4"),),
    "powers of two": (("exp_avg", "mxfp8_e4m3"), ("*", "mxfp8_e5m2")),
    "toward zero": (("*", get_storage(halfstep.get_quantizer("bf16", rounding="toward_zero"))),),
    "bf16": "bf16",
}  # fmt: skip
OPTIMIZERS = {
    "adamw": adamw,
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
    "lion": lambda m: Lion(m.parameters(), lr=1e-3),
    "lamb": lambda m: Lamb(m.parameters(), lr=1e-2),
}


def recipe_with(moments, base="fp32"):
    return replace(get_recipe(base), name="made", moments=moments)


def rounded(kind, x):
    """A moment's values after storing."""
    x = x.detach().clone()
    first = x.to(kind.dtype).float() if kind.dtype else kind.quantizer(x)
    if not kind.residual:
        return first
    rest = x - first
    return first + (rest.to(kind.dtype).float() if kind.dtype else kind.quantizer(rest))


@pytest.mark.quick("tensor-sgd", "packed-sgd", "powers of two-lion")
@pytest.mark.parametrize(
    ("kind", "optimizer"),
    slow_unless(in_turn([*KINDS], [*OPTIMIZERS]).__contains__, itertools.product(KINDS, OPTIMIZERS)),
)
def test_each_step_equals_float32s_with_rounded_moments(kind, optimizer):
    recipe, build = recipe_with(KINDS[kind]), OPTIMIZERS[optimizer]
    model, optimizer, scaler = prepared(recipe, model := mlp(), build(model))
    twin, plain, plain_scaler = prepared("fp32", twin := mlp(), build(twin))
    for _ in range(6):
        losses = train(model, optimizer, scaler, 1), train(twin, plain, plain_scaler, 1)
        assert losses[0] == losses[1]
        for state in plain.state.values():
            for name in state.keys() - {"step"}:
                state[name] = rounded(recipe.moment(name), state[name])
    assert_same(dict(model.state_dict()), dict(twin.state_dict()))


BASES = ["fp32", "bf16-kahan", "bf16-stochastic", "fp8lm-o3"]
ALONE = ("expansion", "tensor")  # CoatAdamW's (test_lowbit_classes.py), and one that would be compiled only for this
RESUMED = [case for case in in_turn([*KINDS], BASES) if case[0] not in ALONE]


@pytest.mark.quick("blocks-fp32", "no scale-bf16-stochastic", "codes twice-fp32")
@pytest.mark.parametrize(("kind", "base"), slow_unless(RESUMED.__contains__, itertools.product(KINDS, BASES)))
def test_a_resumed_run_is_exact_and_keeps_the_codes(kind, base):
    recipe = recipe_with(KINDS[kind], base)
    model, optimizer, scaler = prepared(recipe)
    train(model, optimizer, scaler)
    buffer = io.BytesIO()
    torch.save([dict(model.state_dict()), optimizer.state_dict()], buffer)
    weights, state = torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    resumed, again, rescaler = prepared(recipe, mlp(5))
    resumed.load_state_dict(weights)
    again.load_state_dict(state)
    rescaler.load_state_dict(scaler.state_dict())
    before = copied(again.state_dict()["state"])
    again.load_state_dict(again.state_dict())
    assert_same(again.state_dict()["state"], before)
    assert train(resumed, again, rescaler) == train(model, optimizer, scaler)
    assert_same(again.state_dict()["state"], optimizer.state_dict()["state"])
    assert again.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
    if base == "fp32":
        both = copy.deepcopy((model, optimizer))
        assert_same(both[1].state_dict()["state"], optimizer.state_dict()["state"])


@pytest.mark.slow
def test_a_custom_recipe_trains_with_the_storages_in_its_file(tmp_path):
    (tmp_path / "custom.toml").write_text(CUSTOM)
    recipe = get_recipe(str(tmp_path / "custom.toml"))
    assert from_data(to_data(recipe), get_recipe) == recipe
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64, bias=False), nn.GELU(), nn.Linear(64, 32, bias=False))
    model, optimizer, scaler = prepared(recipe, model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
    losses = train(model, optimizer, scaler, 60, (x, x.flip(1)))
    assert losses[-1] < losses[0] / 5
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        rows, columns = parameter.shape
        assert (state["exp_avg"].dtype, state["exp_avg"].shape) == (torch.uint8, parameter.shape)
        assert (state["exp_avg_scale"].dtype, state["exp_avg_scale"].shape) == (torch.uint8, (rows, columns // 32))
        assert state["exp_avg_sq"].dtype == state["exp_avg_sq_residual"].dtype == torch.bfloat16
    nn.functional.mse_loss(model(x), x).backward()
    predicted, measured = recipe.bytes_per_parameter(), measure(model, optimizer)
    assert (measured.weights, measured.grads, measured.master) == (1, 1, 2)
    assert measured.states == predicted.states == 1 + 1 / 32 + 4
    assert "exp_avg float8_e4m3fn (floor, 1x32), exp_avg_sq bf16 with a residual" in " ".join(recipe.describe().split())


def test_moments_of_torchs_optimizer_are_rounded_when_taken_over():
    recipe = recipe_with(KINDS["codes twice"])
    model = mlp()
    stock = adamw(model)
    model(batch()[0]).square().mean().backward()
    stock.step()
    before = copied(stock.state_dict())["state"]
    for load in (False, True):
        fresh = adamw(model)
        if not load:
            fresh.load_state_dict(stock.state_dict())
        optimizer = halfstep.optim.convert(fresh, recipe, {})
        if load:
            optimizer.load_state_dict(stock.state_dict())
        for number, parameter in enumerate(model.parameters()):
            for name in ("exp_avg", "exp_avg_sq"):
                kind, state = recipe.moment(name), optimizer.state[parameter]
                parts = [{part: state[own] for part, own in kind.names(n).items()} for n in kind.numbers(name)]
                found = [
                    halfstep.ops.Quantized(kind.quantizer, tuple(parameter.shape), torch.float32, p) for p in parts
                ]
                assert_same(sum(q.dequantize() for q in found), rounded(kind, before[number][name]))


def test_codes_of_another_format_are_rounded_again_with_a_warning():
    saved = {}
    for name in ("mxfp8_e4m3", "mxfp8_e5m2", "fp32"):
        model, optimizer, scaler = prepared(recipe_with(name))
        train(model, optimizer, scaler)
        saved[name] = (optimizer, copied(optimizer.state_dict()))
    for name, (optimizer, own) in saved.items():
        for other, (_, state) in saved.items():
            rounds = "fp32" not in (name, other) and name != other
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                optimizer.load_state_dict(nameless(copied(state)))
            assert rounds == any("is rounded again, to" in str(warning.message) for warning in said)
            for number, parameter in enumerate(optimizer.param_groups[0]["params"]):
                values = read(other, state["state"][number], parameter)
                assert_same(read(name, optimizer.state[parameter], parameter), get_storage(name).quantizer(values))
        optimizer.load_state_dict(own)
        broken = copied(own)
        broken["state"][0]["exp_avg"] = broken["state"][0]["exp_avg"][:3]
        with pytest.raises(OptimizerError, match=r"parameter 0 holds exp_avg (as|of shape).*\(3, 8\)"):
            optimizer.load_state_dict(broken)
        if name != "fp32":
            unnamed = copied(own)
            unnamed["param_groups"][0].pop("state_formats")
            with pytest.raises(OptimizerError, match="of a format it does not name"):
                optimizer.load_state_dict(unnamed)
            unknown = copied(own)
            unknown["param_groups"][0]["state_formats"] = {"exp_avg": "float 9 9 9, 1x32, floor"}
            with pytest.raises(OptimizerError, match=r"as codes \(float 9 9 9, 1x32, floor\); this recipe keeps it as"):
                optimizer.load_state_dict(unknown)
            assert_same(optimizer.state_dict()["state"], own["state"])


def read(name, state, parameter):
    return halfstep.ops.codes.read(get_storage(name), "exp_avg", state, tuple(parameter.shape))


def test_moments_with_a_residual_load_into_a_recipe_without():
    """By the sum of both tensors."""
    model, optimizer, scaler = prepared("bf16-collage-plus")
    train(model, optimizer, scaler)
    state = optimizer.state_dict()
    alone, other, _ = prepared(recipe_with("bf16", "bf16-collage-plus"))
    other.load_state_dict(nameless(state))
    for number, parameter in enumerate(alone.parameters()):
        pair = state["state"][number]
        total = pair["exp_avg_sq"].float() + pair["exp_avg_sq_residual"].float()
        assert_same(other.state[parameter]["exp_avg_sq"], total.bfloat16())
        assert "exp_avg_sq_residual" not in other.state[parameter]


@pytest.mark.parametrize(
    ("moments", "words"),
    [
        ("mxfp9", "recipe 'made': moments: 'mxfp9': unknown format"),
        ((("exp_avg", "mxfp9"),), "recipe 'made': moments: 'mxfp9': unknown format"),
        ("llm_int8", "moments: stored with outliers = 6"),
    ],
)
def test_unsupported_storages_of_moments_are_refused(moments, words):
    with pytest.raises(RecipeError, match=words):
        recipe_with(moments)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ('exp_avg = "e4m3f"', "moments: 'e4m3f': unknown format 'e4m3f'; nearest: "),
        ('exp_avg = {format = "e4m3fn", residul = true}', "unknown key of an operand 'residul'"),
        ('exp_avg = {format = "bf16", residual = 1}', "residual = 1 found; expected true or false"),
        ('exp_avg = {format = "e4m3fn", tile = "tensor", scale = "delayed"}', "stored with scale = 'delayed'"),
        ('exp_avg = {format = "bf16", rounding = "stochastic"}', "stored with rounding = 'stochastic'"),
        ("exp_avg = 3", "exp_avg = 3 found; expected a name or a table"),
    ],
)
def test_invalid_moments_in_a_file_are_refused_with_their_position(tmp_path, table, words):
    path = tmp_path / "mine.toml"
    path.write_text(f'name = "mine"\n[moments]\n{table}\n')
    with pytest.raises(RecipeError, match=rf"mine.toml(:\d|, line \d|.*3).*{re.escape(words)}|{re.escape(words)}"):
        get_recipe(str(path))


def test_moments_of_shards_with_partial_tiles_stay_in_float32():
    """A parameter of 4 x 32 over 2 ranks."""

    class Sharded(torch.Tensor):
        placements = (Shard(0),)
        device_mesh = torch.zeros(2)

    whole = torch.zeros(4, 32).as_subclass(Sharded)
    for kind, expected in (
        (get_storage("mxfp8_e4m3"), True),
        (get_storage("dynamic8", flat=True), False),
        (get_storage("fp32"), True),
    ):
        recipe = recipe_with(kind)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found = halfstep.optim.states.kind_of(recipe, "exp_avg", (4, 32), whole)
        assert found == (kind if expected else get_storage("fp32"))
        assert bool(said) != expected
    with pytest.raises(OptimizerError, match=r"shape \(4, 32\) would be kept as .*which needs the whole tensor"):
        halfstep.optim.states.kind_of(halfstep.get_recipe("fp8-fishman"), "exp_avg", (4, 32), whole)
    with pytest.raises(
        OptimizerError, match=r"m of a sharded parameter of shape \(4, 32\) was saved in another format"
    ):
        halfstep.optim.states.encode(get_storage("mxfp8_e4m3"), "m", whole)


@pytest.mark.quick("mxfp8_e4m3", "nvfp4", "fp32")
@pytest.mark.parametrize("name", ["fp32", "bf16", "e4m3fn", "mxfp8_e4m3", "mxfp4", "nvfp4", "nf4", "fp8_block"])
def test_the_storages_bytes_per_element_are_those_of_the_tensors(name):
    try:
        kind = get_storage(name)
    except RecipeError:
        pytest.skip(f"no format {name}")
    shape = (1024, 1024)
    for storage in (kind, Storage(kind.quantizer, residual=True)):
        tensors = halfstep.optim.states.encode(storage, "m", torch.randn(shape))
        layout = storage.layout("m", shape)
        assert {key: (t.dtype, tuple(t.shape)) for key, t in tensors.items()} == layout
        assert sum(t.nbytes for t in tensors.values()) / 2**20 == pytest.approx(storage.bytes, rel=1e-5)


def blocked(format, columns, rule="absmax"):
    return get_storage(Quantizer(formats.get(format), scales=Scales(Tile(1, columns), get_scaling(rule))))


def of_tensor(format, rule):
    return get_storage(Quantizer(formats.get(format), scales=Scales(TENSOR, get_scaling(rule))))


FUSED = {
    "dynamic maps": (("exp_avg", "dynamic8"), ("*", blocked("dynamic8_unsigned", 256))),
    "mx": "mxfp8_e4m3",
    "mx and numbers": (("exp_avg", "mxfp8_e5m2"), ("exp_avg_sq", get_storage("bf16", residual=True))),
    "absmax": (("exp_avg", blocked("e4m3fn", 256)), ("exp_avg_sq", blocked("e5m2", 128))),
    "absmax in tiles alike": (("exp_avg", blocked("e4m3fn", 256)), ("exp_avg_sq", blocked("e5m2", 256))),
    "integers": (("exp_avg", blocked("int8", 64)), ("exp_avg_sq", "fp32")),
    "rceil": (("*", blocked("e4m3fnuz", 16, "rceil")),),
    "fishman's": (("exp_avg", of_tensor("e4m3fn", "current")), ("*", of_tensor("e5m2", "current"))),
    "fp8-lm's": (("exp_avg", of_tensor("e4m3fn", "rceil")), ("*", of_tensor("fp16", "rceil"))),
    "one of two": (("exp_avg", "bf16"), ("*", of_tensor("e5m2", "current"))),
    "expansion": (("exp_avg", blocked("e4m3fn", 128, "expansion")), ("*", blocked("e5m2", 256, "expansion"))),
    "in sixteenths": (("*", blocked("e4m3fn", 128, "expansion_sixteenths")),),
}


MIXED = ("mx and numbers", "one of two", "absmax", "rceil", "integers", "expansion")
"""Slow, since each is another compilation; others or conformance/test_every_master.py cover their parts."""


@pytest.mark.quick("dynamic maps", "mx", "fishman's")
@pytest.mark.parametrize(
    ("moments", "base"),
    [
        pytest.param(moments, "fp32", id=name, marks=pytest.mark.slow if name in MIXED else ())
        for name, moments in FUSED.items()
    ]
    + [
        pytest.param(FUSED["mx"], base, id=base, marks=pytest.mark.slow)
        for base in ("bf16-master", "bf16-stochastic", "bf16-kahan")
    ],
)
def test_the_fused_step_on_coded_moments_equals_the_reference(moments, base):
    found = []
    for fused in (True, False):
        torch.manual_seed(0)
        model, optimizer, _ = prepared(recipe_with(moments, base), nn.Linear(512, 80, bias=False), generator=0)
        seen = []
        rule = optimizer.rule
        own = rule.fused if fused else no_fused_update
        optimizer.rule = replace(rule, fused=lambda step, own=own, seen=seen: seen.append(own(step)) or seen[-1])
        for step in range(3):
            model.weight.grad = torch.randn(80, 512).to(model.weight.dtype) * 10.0 ** (step - 4)
            model.weight.grad[3, 5:40] = 0
            if step == 2:
                model.weight.grad[7, 9] = torch.inf
            optimizer.step()
        assert bool(seen[0]) is fused
        found.append([model.weight, *optimizer.state[model.weight].values()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


UNUSUAL = ("bf16-master", "bf16-split", "bf16-kahan", "bf16-collage-light")


@pytest.mark.parametrize(
    ("moments", "base"),
    slow_unless(
        lambda case: case[1] == "fp32",
        [
            *(("absmax in tiles alike", base) for base in ("fp32", "bf16-stochastic", *UNUSUAL)),
            *(("dynamic maps", base) for base in ("fp32", *UNUSUAL)),
        ],
    ),
)
def test_the_fused_step_on_unusual_codes_and_scales_equals_the_reference(moments, base):
    """NaN codes, negative zeros, and scales of any size, in the middle of a chunk."""
    found = []
    for fused in (True, False):
        torch.manual_seed(0)
        model, optimizer, _ = prepared(recipe_with(FUSED[moments], base), nn.Linear(512, 80, bias=False), generator=0)
        own, seen = optimizer.rule.fused if fused else no_fused_update, []
        optimizer.rule = replace(
            optimizer.rule, fused=lambda step, own=own, seen=seen: seen.append(own(step)) or seen[-1]
        )
        weight = model.weight
        for step in range(3):
            weight.grad = torch.randn(80, 512).to(weight.dtype)
            optimizer.step()
            assert bool(seen[-1]) is fused
            for name in ("exp_avg", "exp_avg_sq") if step < 2 else ():
                codes, scale = optimizer.state[weight][name].view(torch.uint8), optimizer.state[weight][name + "_scale"]
                codes[10, 256:] = torch.arange(256, dtype=torch.uint8)
                codes[11, 260] = 0x7C  # E5M2's infinity
                codes[50 + step, :256] = 0x80
                for i, unusual in enumerate([0.0, 1e-45, 1e-39, 1e-37, 1e29, 1e31, 3e38, torch.inf, torch.nan]):
                    scale[20 + i, 0] = unusual
                scale[50 + step, 0] = 0
        found.append([weight, *optimizer.state[weight].values()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.slow  # seconds of compiling; tests/kernels/test_cpu_optimizer.py has threads
def test_threads_change_no_bit_of_expanded_moments():
    """The parallel kernel is compiled separately and takes fewer kinds of arguments."""
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)  # the next test's fixture resets it
        torch.manual_seed(0)
        model, optimizer, _ = prepared(recipe_with(FUSED["in sixteenths"]), nn.Linear(512, 80, bias=False))
        model.weight.grad = torch.randn(80, 512)
        optimizer.step()
        found.append([model.weight.detach(), *optimizer.state[model.weight].values()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def eight_bit(smallest=0):
    """bitsandbytes' storages: dynamic maps, in blocks of 256 elements of the flattened tensor."""
    options = {"flat": True, "smallest": smallest}
    second = Quantizer(formats.get("dynamic8_unsigned"), scales=Scales(Tile(1, 256), get_scaling("absmax")))
    return (("exp_avg", get_storage("dynamic8", **options)), ("*", get_storage(second, **options)))


@pytest.mark.parametrize("shape", [(40, 256), (33, 100), (3, 5, 7), (512,), (1,)])
def test_flat_storages_equal_those_of_the_flattened_tensor(shape):
    torch.manual_seed(0)
    parameter, row = nn.Parameter(torch.randn(shape)), None
    module = nn.Module()
    module.weight = parameter
    _, optimizer, _ = prepared(recipe_with(eight_bit()), module)
    row = nn.Parameter(parameter.detach().reshape(1, -1).clone())
    beside = nn.Module()
    beside.weight = row
    _, other, _ = prepared(recipe_with(eight_bit()), beside)
    for _ in range(3):
        parameter.grad = torch.randn(shape)
        row.grad = parameter.grad.reshape(1, -1).clone()
        optimizer.step()
        other.step()
    assert_same(parameter.flatten(), row.flatten())
    for name, value in optimizer.state[parameter].items():
        assert_same(value, other.state[row][name])
    blocks = -(-parameter.numel() // 256)
    assert optimizer.state[parameter]["exp_avg_scale"].numel() == blocks


def test_moments_of_small_tensors_stay_in_float32_and_resume():
    def build():
        torch.manual_seed(0)
        return prepared(recipe_with(eight_bit(4096)), nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3)))

    torch.manual_seed(1)
    data = torch.randn(8, 64), torch.randn(8, 3)
    model, optimizer, scaler = build()
    train(model, optimizer, scaler, 2, data)
    dtypes = [optimizer.state[p]["exp_avg"].dtype for p in model.parameters()]
    assert dtypes == [torch.uint8, torch.float32, torch.float32, torch.float32]
    saved = copied(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    again, resumed, other = build()
    again.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    train(model, optimizer, scaler, 2, data)
    train(again, resumed, other, 2, data)
    for one, two in zip(model.parameters(), again.parameters(), strict=True):
        assert_same(one, two)
    wide = prepared("fp32", nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3)))[1]
    wide.load_state_dict(nameless(saved[1]))
    assert {state["exp_avg"].dtype for state in wide.state.values()} == {torch.float32}


def test_flat_and_smallest_round_trip_through_data():
    data = {
        "name": "mine",
        "moments": {"exp_avg": {"format": "dynamic8", "flat": True, "smallest": 4096}, "*": {"format": "bf16"}},
    }
    recipe = from_data(data, get_recipe)
    assert recipe.moment("exp_avg") == get_storage("dynamic8", flat=True, smallest=4096)
    assert from_data(to_data(recipe), get_recipe) == recipe
    assert "laid out flat, from 4096 elements on" in " ".join(recipe.describe().split())
    for wrong, words in (({"format": "bf16", "flat": True}, "tile = none"), ({"format": "bf16", "smallest": -1}, "-1")):
        with pytest.raises(RecipeError, match=words):
            from_data({"name": "mine", "moments": {"*": wrong}}, get_recipe)


def test_an_8_bit_step_matches_bitsandbytes():
    """One step from zero moments, compared by the weights."""
    import bitsandbytes as bnb  # slow to import

    torch.manual_seed(0)
    weight = torch.randn(64, 256)
    theirs, ours = nn.Parameter(weight.clone()), nn.Linear(256, 64, bias=False)
    with torch.no_grad():
        ours.weight.copy_(weight)
    theirs.grad = torch.randn(64, 256) * 1e-3
    ours.weight.grad = theirs.grad.clone()
    bnb.optim.AdamW8bit([theirs], lr=1e-2, weight_decay=0.1).step()
    stock = torch.optim.AdamW(ours.parameters(), lr=1e-2, weight_decay=0.1)
    _, optimizer, _ = halfstep.prepare(ours, stock, recipe_with(eight_bit()))
    optimizer.step()
    torch.testing.assert_close(ours.weight.detach(), theirs.detach(), rtol=0, atol=1e-6)


def test_vanished_states_counts_zeros_in_coded_and_plain_moments():
    torch.manual_seed(0)
    model, optimizer, _ = prepared(recipe_with(eight_bit(4096)), nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 3)))
    taken = {}
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
        parameter.grad.view(-1)[0] = 1e-12  # its square underflows in a block with larger values
        taken[parameter] = parameter.grad != 0
    optimizer.step()
    lost = {parameter: zeros["exp_avg_sq"].zeros for parameter, zeros in vanished_states(optimizer, taken).items()}
    assert [lost[parameter] > 0 for parameter in model.parameters()] == [True, False, False, False]
