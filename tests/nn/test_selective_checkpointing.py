"""Selective activation checkpointing: the same bits, saved matmuls are not recomputed, and less memory is held."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.weak import WeakIdKeyDictionary

from families import for_each
from tiny import EVERY, assert_same, batch, copied, fast_and_every, grads, model_for, prepared, train


aten = torch.ops.aten
MATMULS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten._scaled_mm.default}


STATES = {"bf16-mixed", "coat", "fp8-delayed", "fp8lm-o2", "nvfp4"}
"""One that rounds no operand, and some that write states, codes or scales in place while they round."""


def save_matmuls(context, operator, *args, **kwargs):
    """As torchtitan's policy: outputs of matmuls are saved."""
    return CheckpointPolicy.MUST_SAVE if operator in MATMULS else CheckpointPolicy.PREFER_RECOMPUTE


def save_everything(context, operator, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE


def save_nothing(context, operator, *args, **kwargs):
    return CheckpointPolicy.PREFER_RECOMPUTE


class Selected(nn.Module):
    """A body that is checkpointed by a policy, or not at all without one."""

    def __init__(self, name, policy=None):
        super().__init__()
        self.body, self.policy = model_for(name), policy

    def forward(self, x):
        if self.policy is None:
            return self.body(x)
        contexts = partial(create_selective_checkpoint_contexts, self.policy)
        return checkpoint(self.body, x, use_reentrant=False, context_fn=contexts)


class Seen(TorchDispatchMode):
    """Counts matmuls, and tracks the storages that were allocated."""

    def __init__(self):
        super().__init__()
        self.matmuls, self._made = 0, WeakIdKeyDictionary()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        out = operator(*args, **(kwargs or {}))
        self.matmuls += operator in MATMULS
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._made[tensor.untyped_storage()] = None
        return out

    @property
    def held(self):
        """The bytes of the storages that are still alive."""
        return sum(storage.nbytes() for storage in self._made)


def run(name, policy):
    """The gradients, the matmuls of the forward and of both passes, and the bytes held between the passes."""
    model, _, scaler = prepared(name, Selected(name, policy))
    x, y = batch()
    x.requires_grad_()
    with Seen() as seen:
        loss = scaler.scale(F.mse_loss(model(x), y))
        forward, held = seen.matmuls, seen.held
        loss.backward()
    return [grads(model), x.grad], forward, seen.matmuls, held


@pytest.mark.quick("carried-fast")
@pytest.mark.parametrize("names", fast_and_every(EVERY, STATES))
@pytest.mark.usefixtures("products")
def test_saved_matmuls_are_not_recomputed_and_bits_are_equal(names):
    @for_each("name", names)
    def check(name):
        found, forward, plain, held = run(name, None)
        again, _, most, least = run(name, save_nothing)
        kept, first, formed, between = run(name, save_matmuls)
        assert_same(again, found)
        assert_same(kept, found)
        assert first == forward
        assert formed == plain, "saved matmuls are recomputed"
        assert least <= between
        assert least < held
        if forward:  # on a CPU some recipes have kernels of their own, which no policy sees
            assert plain < most <= plain + forward  # torch stops once it has recomputed what the backward pass needs
            assert least < between

    check()


@pytest.mark.parametrize("names", fast_and_every(EVERY, STATES))
def test_a_policy_may_save_everything(names):
    @for_each("name", names)
    def check(name):
        setups = [prepared(name, Selected(name, policy)) for policy in (None, save_everything)]
        assert train(*setups[0], 2) == train(*setups[1], 2)
        assert_same(*[[copied(each.state_dict()) for each in setup] for setup in setups])

    check()
