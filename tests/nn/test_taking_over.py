"""Two ways to replace a layer's forward, by a class and by an instance attribute: docs/design.md's table of
outcomes."""

import copy
import pickle
import warnings
from pathlib import Path
from types import MethodType

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from halfstep.nn.adopt import adopt


PAGE = (Path(__file__).parents[2] / "docs" / "design.md").read_text()
X = torch.ones(1, 2)


def doubled(stock, module, x):
    """A stand-in for a recipe: twice the output of the module it is called with."""
    return 2 * stock(module, x)


def instance_forward(self, x):
    return doubled(type(self).forward, self, x)


def by_class(module):
    adopt(module, doubled, patchable=True)
    return module


def by_instance(module):
    module.forward = MethodType(instance_forward, module)
    return module


class Stock(nn.Linear):
    """A layer whose output is the sum of each weight row."""

    def __init__(self):
        super().__init__(2, 2, bias=False)
        nn.init.ones_(self.weight)


def gives(module, value):
    return bool((module(X) == value).all())


def asked_by_isinstance(take):
    return isinstance(take(Stock()), nn.Linear)


def asked_by_type(take):
    return type(take(Stock())) is Stock


def copied_deeply(take):
    other = copy.deepcopy(take(Stock()))
    other.weight.data.fill_(3.0)
    return gives(other, 12)


def copied_and_given_a_weight(take):
    module = take(Stock())
    other = copy.copy(module)
    other._parameters = {"weight": nn.Parameter(torch.full((2, 2), 3.0)), "bias": None}
    return gives(other, 12) and gives(module, 4)


def replicated(take):
    module = take(Stock())
    replica = module._replicate_for_data_parallel()
    replica.weight, replica.bias = torch.full((2, 2), 3.0), None  # as torch.nn.parallel.replicate does
    return gives(replica, 12) and gives(module, 4)


def pickled(take):
    return gives(pickle.loads(pickle.dumps(take(Stock()))), 4)


def called_with_other_weights(take):
    module = take(Stock())
    return bool((torch.func.functional_call(module, {"weight": torch.full((2, 2), 3.0)}, (X,)) == 12).all())


def hooked(take):
    module, calls = take(Stock()), []
    module.register_forward_hook(lambda *_: calls.append(1))
    return gives(module, 4) and len(calls) == 1


def compiled(take):
    torch._dynamo.reset()
    return gives(torch.compile(take(Stock()), backend="eager", fullgraph=True), 4)


def exported(take):
    root = nn.Sequential(take(Stock()))
    return gives(torch.export.export(root, (X,)).module(), 4)


def parametrized_later(take):
    module = take(Stock())
    parametrize.register_parametrization(module, "weight", nn.Identity())
    return gives(module, 4)


def given_a_forward_by_its_user(take):
    """As accelerate and Lightning set one: the recipe stays around it."""
    module = take(Stock())
    module.forward = lambda x: 5 * x
    return gives(module, 10)


def given_its_own_forward_back(take):
    """A library that patched the forward before `apply` restores it (accelerate's unwrap_model)."""
    module = Stock()
    stock = module.forward
    take(module)
    module.forward = stock
    return gives(module, 4)


WAYS = {
    "`isinstance(m, nn.Linear)`": asked_by_isinstance,
    "`type(m) is nn.Linear`": asked_by_type,
    "`copy.deepcopy`": copied_deeply,
    "`copy.copy`, then another weight": copied_and_given_a_weight,
    "replicas of `nn.DataParallel`": replicated,
    "`pickle`, `torch.save(model)`": pickled,
    "`torch.func.functional_call`": called_with_other_weights,
    "hooks": hooked,
    "`torch.compile`, one graph": compiled,
    "`torch.export`": exported,
    "`parametrize` afterwards": parametrized_later,
    "a `forward` set by the user": given_a_forward_by_its_user,
    "the stock `forward` set back": given_its_own_forward_back,
}


def found(way, take):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return "right" if way(take) else "wrong, silent"
        except Exception as error:
            return f"an error ({type(error).__name__})"


@pytest.mark.filterwarnings("ignore")
def test_the_table_in_design_md_states_the_outcomes():
    rows = [f"| {name} | {found(way, by_class)} | {found(way, by_instance)} |" for name, way in WAYS.items()]
    assert "\n".join(rows) in PAGE, "\n" + "\n".join(rows)
