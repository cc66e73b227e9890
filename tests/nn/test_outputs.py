"""Outputs of a model are float32 in any nesting, and its autocast ends with the call."""

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass, field
from types import MappingProxyType

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from transformers.modeling_outputs import CausalLMOutputWithPast

import halfstep
from families import for_each
from halfstep.nn.following import to_float32
from tiny import RECIPES, mostly_slow


Pair = namedtuple("Pair", "first second")


@dataclass
class Plain:
    a: object
    b: object = field(default=None)


@dataclass(frozen=True)
class Frozen:
    a: object


class Returns(nn.Module):
    """A linear layer whose output is nested by `wrap`."""

    def __init__(self, wrap):
        super().__init__()
        self.layer, self.wrap = nn.Linear(3, 3), wrap

    def forward(self, x):
        return self.wrap(self.layer(x))


NESTED = {
    "tensor": (lambda y: y, lambda o: o),
    "tuple": (lambda y: (y, [y, {"k": y}], 3, None), lambda o: o[1][1]["k"]),
    "namedtuple": (lambda y: Pair(1, y), lambda o: o.second),
    "dict": (lambda y: {"loss": y}, lambda o: o["loss"]),
    "ordered": (lambda y: OrderedDict(loss=y), lambda o: o["loss"]),
    "userdict": (lambda y: UserDict(loss=y), lambda o: o["loss"]),
    "mapping": (lambda y: MappingProxyType({"loss": y}), lambda o: o["loss"]),
    "dataclass": (lambda y: Plain(a=[y]), lambda o: o.a[0]),
    "frozen": (lambda y: Frozen(Plain(1, y)), lambda o: o.a.b),
    "structseq": (lambda y: y.max(0), lambda o: o.values),
    "packed": (lambda y: pack_sequence([y]), lambda o: o.data),
    "hugging face": (lambda y: CausalLMOutputWithPast(logits=y, hidden_states=(y, y)), lambda o: o.hidden_states[1]),
}


@pytest.mark.quick("fp32", "bf16-collage-plus", "bf16-stochastic")
@pytest.mark.parametrize("name", mostly_slow(RECIPES))
@for_each("nesting", NESTED)
def test_floating_outputs_are_float32_in_any_nesting(name, nesting):
    wrap, get = NESTED[nesting]
    model = Returns(wrap)
    stock = type(model(torch.ones(2, 3)))
    halfstep.apply(model, name)
    output = model(torch.ones(2, 3))
    assert get(output).dtype == torch.float32
    assert type(output) is stock
    get(output).sum().backward()
    assert model.layer.weight.grad is not None


def test_hugging_face_outputs_convert_attributes_keys_and_indices():
    half = torch.ones(2).half()
    output = to_float32(CausalLMOutputWithPast(loss=half[0], logits=half))
    assert output.logits.dtype == output["logits"].dtype == output[1].dtype == torch.float32
    assert output.loss.dtype == output[0].dtype == torch.float32
    assert list(output) == ["loss", "logits"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int64, torch.bool, torch.complex64])
def test_values_other_than_16_bit_floats_pass_unchanged(dtype):
    x = torch.ones(2).to(dtype)
    assert to_float32(x) is x
    something = object()
    assert to_float32(something) is something
    assert to_float32("text") == "text"


def test_converting_outputs_does_not_modify_the_models_objects():
    inner = {"y": torch.ones(2).half()}
    kept = Plain(a=inner, b=[inner["y"]])
    to_float32(kept)
    assert inner["y"].dtype == kept.b[0].dtype == torch.float16


class Fails(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        assert torch.is_autocast_enabled("cpu")
        self.layer(x)
        raise KeyError("mine")


def test_autocast_ends_after_an_exception():
    model = Fails()
    halfstep.apply(model, "bf16-mixed")
    with pytest.raises(KeyError, match="mine"):
        model(torch.ones(1, 3))
    assert not torch.is_autocast_enabled("cpu")
    assert nn.Linear(3, 3)(torch.ones(1, 3)).dtype == torch.float32


def test_keyword_arguments_and_defaults_reach_the_forward():
    class Model(nn.Linear):
        def forward(self, x, *, times=2, **more):
            return super().forward(x) * times * more.get("extra", 1)

    torch.manual_seed(0)
    model = Model(2, 2)
    expected = model(torch.ones(1, 2), times=3, extra=5)
    halfstep.apply(model, "fp32")
    torch.testing.assert_close(model(torch.ones(1, 2), times=3, extra=5), expected, rtol=0, atol=0)
