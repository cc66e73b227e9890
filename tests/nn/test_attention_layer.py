"""`nn.MultiheadAttention` under a recipe: bit-equal to torch without rounding, and its projections rounded by rules."""

import itertools
import threading

import pytest
import torch
from torch import nn

import halfstep
from families import for_each, in_turn, slow_unless
from halfstep import formats
from halfstep.nn.adapters import attention
from halfstep.nn.adopt import adopt, release
from halfstep.ops.part import own_part
from halfstep.quant import Quantizer
from halfstep.recipe import LinearSpec, Matmul, Recipe, Rule, get_recipe
from tiny import FAST, SMOOTH, assert_same, prepared


pytestmark = pytest.mark.cpu
FP8 = Quantizer(formats.get("e4m3fn"))
SPEC = LinearSpec(Matmul(FP8, FP8), Matmul(FP8, FP8), Matmul(FP8, FP8))
OPTIONS = {
    "plain": {},
    "batch_first": {"batch_first": True},
    "no_bias": {"bias": False},
    "bias_kv": {"add_bias_kv": True},
    "zero_attn": {"add_zero_attn": True, "add_bias_kv": True},
    "kdim": {"kdim": 6, "vdim": 10},
    "kdim_batch_first": {"kdim": 6, "vdim": 8, "batch_first": True, "bias": False},
    "dropout": {"dropout": 0.3},
}


def made(**options):
    torch.manual_seed(0)
    module = nn.MultiheadAttention(8, 2, **options)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module


def inputs(module, kind, batch=3, time=4, sources=5):
    generator = torch.Generator().manual_seed(1)

    def draw(length, width):
        shape = (batch, length, width) if module.batch_first else (length, batch, width)
        return torch.randn(*shape, generator=generator)

    if kind == "self":
        x = draw(time, 8)
        return x, x, x
    if kind == "memory" and module.kdim == module.vdim:
        memory = draw(sources, module.kdim)
        return draw(time, 8), memory, memory
    return draw(time, 8), draw(sources, module.kdim), draw(sources, module.vdim)


def masks(kind, time, sources):
    padding = torch.zeros(3, sources, dtype=torch.bool)
    padding[1, -2:] = True
    causal = nn.Transformer.generate_square_subsequent_mask(max(time, sources))[:time, :sources]
    return {
        "none": {},
        "padding": {"key_padding_mask": padding},
        "bool": {"attn_mask": causal.isinf()},
        "both": {"key_padding_mask": padding, "attn_mask": causal.isinf()},
        "float": {"attn_mask": causal},
        "heads": {"attn_mask": causal.expand(6, -1, -1)},
        "causal": {"attn_mask": causal, "is_causal": True},
        "causal_padded": {"attn_mask": causal.isinf(), "key_padding_mask": padding, "is_causal": True},
    }[kind]


def outcome(module, arguments, options):
    torch.manual_seed(3)
    output, weights = module(*arguments, **options)
    module.zero_grad()
    (output.square().sum() + (0 if weights is None else weights.square().sum())).backward()
    return output, weights, [p.grad for p in module.parameters()]


KINDS = ["memory", "self", "apart"]


@pytest.mark.quick("no_bias-apart", "bias_kv-memory", "zero_attn-self", "kdim_batch_first-memory", "dropout-self")
@pytest.mark.parametrize(
    ("option", "kind"), slow_unless(in_turn([*OPTIONS], KINDS).__contains__, itertools.product(OPTIONS, KINDS))
)
def test_attention_without_rounding_equals_torchs(option, kind):
    """In float32 and in training, bit for bit, for every mask, with and without attention weights. (Gradients of biases
    are sums over rows, which torch adds in another order if batch_first.)"""
    if kind == "self" and "kdim" in option:
        pytest.skip("queries, keys and values of other widths")
    stock, module = made(**OPTIONS[option]), made(**OPTIONS[option])
    own_part(module).linear = LinearSpec()
    adopt(module, attention.forward)
    time, sources = (4, 4) if kind == "self" else (4, 5)
    arguments = inputs(stock, kind)
    for mask, needed, averaged in itertools.product(
        ("none", "padding", "bool", "both", "float", "heads", "causal", "causal_padded"), (True, False), (True, False)
    ):
        options = {"need_weights": needed, "average_attn_weights": averaged, **masks(mask, time, sources)}
        expected, found = (outcome(each, arguments, options) for each in (stock, module))
        assert found[0].shape == expected[0].shape
        assert_same(found[:2], expected[:2])
        if option == "batch_first" and kind == "apart":
            torch.testing.assert_close(found[2], expected[2], rtol=1e-4, atol=1e-3)
        else:
            assert_same(found[2], expected[2])
    release(module)
    assert type(module) is nn.MultiheadAttention


@pytest.mark.parametrize("batch_first", [True, False])
def test_unbatched_attention_equals_torchs(batch_first):
    stock, module = made(batch_first=batch_first), made(batch_first=batch_first)
    own_part(module).linear = LinearSpec()
    adopt(module, attention.forward)
    x = torch.randn(4, 8)
    for options in ({}, {"key_padding_mask": torch.tensor([False, False, True, True])}, {"need_weights": False}):
        assert_same(outcome(module, (x, x, x), options), outcome(stock, (x, x, x), options))
    with pytest.raises(RuntimeError, match="pass the mask"):
        module(x, x, x, is_causal=True)


def recipe(*rules, **fields):
    return Recipe("made", "", "", rules=rules, **fields)


class Attends(nn.Module):
    def __init__(self, kind=nn.MultiheadAttention):
        super().__init__()
        torch.manual_seed(0)
        self.attention = kind(8, 2)

    def forward(self, x):
        return self.attention(x, x, x)[0]


@pytest.mark.usefixtures("products")
def test_each_projection_follows_its_own_rule():
    x, outputs = torch.randn(4, 3, 8), {}
    for path in ("none", "attention", "attention.out_proj", "*"):
        model = Attends()
        report = halfstep.apply(model, recipe(Rule(path, SPEC, optional=True)))
        outputs[path] = model(x)
        model(x).sum().backward()
        expected = {"none": (), "*": ("attention", "attention.out_proj")}.get(path, (path,))
        assert report.quantized == expected
        halfstep.revert(model)
        assert type(model.attention) is nn.MultiheadAttention
        assert_same(model(x), Attends()(x))
    assert_same(outputs["none"], Attends()(x))
    assert len({tuple(o.flatten().tolist()) for o in outputs.values()}) == 4


@pytest.mark.filterwarnings("ignore:.*does not round")
def test_an_overridden_attention_forward_is_not_quantized():
    class Mine(nn.MultiheadAttention):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    model = nn.Sequential(nn.Linear(8, 8), Attends(Mine))
    report = halfstep.apply(model, "fp8-current")
    assert report.quantized == ("0",)
    assert report.kept["1.attention"] == "its forward, or its out_proj's, is not torch's"
    assert report.kept["1.attention.out_proj"] == "nn.MultiheadAttention reads its weight and never calls it"


def test_scaling_states_of_attention_update_and_load():
    class Tokens(Attends):
        def forward(self, x):
            return super().forward(x).mean(0)

    states = []
    for steps in (2, 3):
        model, optimizer, scaler = prepared("fp8-delayed", Tokens())
        for _ in range(steps):
            model(torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(0))).square().mean().backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        names = {n.replace("_halfstep_scaling_", "") for n, _ in model.named_buffers()}
        operands = ("input", "weight", "grad_output")
        assert names == {f"attention.{part}{o}" for part in ("", "out_proj.") for o in operands}
        assert all(b[0] > 1 for b in model.buffers())
        states.append(scaler.state_dict())
    model, _, scaler = prepared("fp8-delayed", Tokens())
    scaler.load_state_dict(states[1])
    assert_same(scaler.state_dict(), states[1])


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")  # torch's own, on the fast path
@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("padded", [False, True])
def test_evaluation_without_gradients_rounds_instead_of_taking_torchs_fast_path(padded):
    """torch's fast path reads the weights and calls no layer."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    x = torch.randn(2, 5, 8)
    options = {"src_key_padding_mask": torch.tensor([[False] * 5, [False] * 3 + [True] * 2])} if padded else {}
    with torch.no_grad():
        stock = model(x, **options)
        halfstep.apply(model, recipe(Rule("*", SPEC)))
        rounded = model(x, **options)
    with_gradients = model(x, **options)
    assert_same(rounded, with_gradients.detach())
    keep = ~options["src_key_padding_mask"] if padded else slice(None)
    assert not torch.equal(rounded[keep], stock[keep])
    torch.testing.assert_close(rounded[keep], stock[keep], rtol=0.3, atol=0.3)
    assert torch.backends.mha.get_fastpath_enabled()
    halfstep.revert(model)
    with torch.no_grad():
        assert_same(model(x, **options), stock)


class Padded(nn.Module):
    """An encoder between two layers."""

    def __init__(self, encoder):
        super().__init__()
        self.first, self.encoder, self.head = nn.Linear(8, 8), encoder, nn.Linear(8, 8)

    def forward(self, x, src_key_padding_mask):
        return self.head(self.encoder(self.first(x), src_key_padding_mask=src_key_padding_mask))


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")  # torch's own, on the fast path
@for_each(
    "name", [*(FAST - {*SMOOTH}), "fp8-current until 50%, then bf16-mixed", "bf16-mixed until 50%, then fp8-current"]
)
@for_each("nested", [False, True])
def test_padded_encoder_in_evaluation_matches_the_forward_with_gradients(name, nested):
    """Positions that are not padding are compared. Stock autocast fails on a CPU here."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    model = Padded(model).eval() if nested else model
    x, mask = torch.randn(2, 5, 8), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    expected = model(x, src_key_padding_mask=mask)
    halfstep.apply(model, name)
    with torch.no_grad():
        found = model(x, src_key_padding_mask=mask)
    torch.testing.assert_close(found[~mask], expected[~mask], rtol=0.3, atol=0.3)
    if get_recipe(name).rules:  # under the others layers may take torch's fast path
        assert_same(found, model(x, src_key_padding_mask=mask).detach())


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
def test_a_quantized_encoder_leaves_the_global_fast_path_switch_on():
    """Seen from within two concurrent forwards: the switch is global to the process."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model, seen, both = nn.TransformerEncoder(layer, 1).eval(), [], threading.Barrier(2)
    halfstep.apply(model, "fp8-current")

    def nested(*_):
        both.wait(20)
        seen.append(torch.backends.mha.get_fastpath_enabled())
        both.wait(20)

    model.layers[0].dropout.register_forward_hook(nested)
    threads = [threading.Thread(target=model, args=(torch.ones(2, 5, 8),)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [True, True]
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.slow  # what the fast tests trace goes the same way
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch does, as it traces
def test_a_traced_encoder_equals_eager(training):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 1)
    halfstep.apply(model.train(training), "fp8-current")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 5, 8)
    with torch.set_grad_enabled(training):
        assert_same(compiled(x), model(x))
