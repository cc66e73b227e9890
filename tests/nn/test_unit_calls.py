"""`unit_scale` by the way a model is called: modules called several times, and batches by name."""

from collections import UserDict

import pytest
import torch
from torch import nn

import halfstep
from halfstep.errors import ModelError
from unit_scaled import off_direction, sizes


IDS = torch.randint(0, 64, (8, 20), generator=torch.Generator().manual_seed(0))


class Shared(nn.Module):
    """An encoder and a decoder that share an embedding and a layer, for sequences of different lengths."""

    def __init__(self):
        super().__init__()
        self.table, self.mix = nn.Embedding(64, 32), nn.Linear(32, 32, bias=False)
        self.encoder, self.decoder, self.head = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 64, bias=False)

    def forward(self, source, target):
        read = self.encoder(self.mix(self.table(source)))[:, :1]
        return self.head(self.decoder(self.mix(self.table(target))) + read)


@pytest.mark.parametrize("residual", [None, 0.5])
def test_shared_modules_may_have_inputs_of_different_lengths(residual):
    torch.manual_seed(0)
    model, batch = Shared(), {"source": IDS[:, :20], "target": IDS[:, :5]}
    halfstep.unit_scale(model, **batch, constraint="to_output", residual=residual)
    values, grads, weights = sizes(model, (), batch)
    assert all(1 / 3 < size < 3 for size in (*values.values(), weights["table.weight"], weights["mix.weight"]))
    assert all(0.1 < size < 3 for size in (*grads.values(), *weights.values()))
    assert max(off_direction(model.double(), (), batch).values()) < 1e-9


def test_a_module_called_with_different_factors_is_refused_with_advice():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.activation = nn.Linear(8, 8), nn.GELU()

        def forward(self, x):
            return self.activation(self.first(self.activation(x)))

    with pytest.raises(ModelError, match=r"called several times .* Give `residual` a fixed share .* or give each call"):
        halfstep.unit_scale(Twice(), 3 * torch.randn(16, 8))
    with pytest.raises(ModelError, match=r"has one class\. Give each call a module of its own"):
        halfstep.unit_scale(Twice(), 3 * torch.randn(16, 8), residual=0.5)


class Batched(nn.Module):
    """A model that takes one mapping."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, batch):
        return self.inner(**batch)


def test_a_batch_may_be_keywords_or_a_mapping():
    batch = {"source": IDS[:, :20], "target": IDS[:, :5]}
    reports = []
    for kind, inputs, named in (
        (Shared(), (), batch),
        (Shared(), (batch,), {}),
        (Shared(), (UserDict(batch),), {}),
        (nn.DataParallel(Shared()), (batch,), {}),  # its forward takes any arguments
        (Batched(Shared()), (batch,), {}),
    ):
        report = halfstep.unit_scale(kind, *inputs, **named)
        reports.append([(each.forward, each.backward) for each in report.operations])
    assert all(report == reports[0] for report in reports)
    with pytest.raises(TypeError, match="unexpected keyword argument 'labels'"):
        halfstep.unit_scale(Shared(), batch | {"labels": IDS})


class Gated(nn.Module):
    """Squeeze and excite, then a shift per channel from another input and a gain, each broadcast to 12 x 12
    positions."""

    def __init__(self, in_place):
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 16, 3, bias=False), nn.Conv2d(16, 8, 1)
        self.squeeze, self.excite, self.shift = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(5, 16, bias=False)
        self.gain, self.in_place = nn.Parameter(torch.randn(16, 1, 1)), in_place

    def forward(self, x, time):
        x = self.stem(x)
        gate = torch.sigmoid(self.excite(torch.tanh(self.squeeze(x.mean((2, 3))))))[:, :, None, None]
        if self.in_place:
            x = x.clone()
            x.mul_(gate)
        else:
            x = gate * x
        return self.head((x + self.shift(torch.tanh(time))[:, :, None, None]) * self.gain)


@pytest.mark.parametrize("in_place", [False, True])
def test_gradients_of_broadcast_operands_have_unit_size_and_true_direction(in_place):
    torch.manual_seed(0)
    model, inputs = Gated(in_place), (torch.randn(8, 3, 14, 14), torch.randn(8, 5))
    halfstep.unit_scale(model, *inputs)
    _, grads, weights = sizes(model, inputs, {})
    assert all(1 / 3 < grads[name] < 3 for name in ("squeeze", "excite", "shift"))
    assert 1 / 3 < weights["gain"] < 3
    assert max(off_direction(model.double(), tuple(x.double() for x in inputs), {}).values()) < 1e-6
