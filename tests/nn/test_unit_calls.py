"""`unit_scale` and how a model is called: modules that are called several times, and batches by name."""

from collections import UserDict

import pytest
import torch
from torch import nn

import halfstep
from halfstep.errors import ModelError
from unit_scaled import off_direction, sizes


IDS = torch.randint(0, 64, (8, 20), generator=torch.Generator().manual_seed(0))


class Shared(nn.Module):
    """An encoder and a decoder that share an embedding and a layer, whose sequences are of other lengths."""

    def __init__(self):
        super().__init__()
        self.table, self.mix = nn.Embedding(64, 32), nn.Linear(32, 32, bias=False)
        self.encoder, self.decoder, self.head = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 64, bias=False)

    def forward(self, source, target):
        read = self.encoder(self.mix(self.table(source)))[:, :1]
        return self.head(self.decoder(self.mix(self.table(target))) + read)


@pytest.mark.parametrize("residual", [None, 0.5])
def test_an_embedding_and_a_layer_may_be_shared_by_sequences_of_other_lengths(residual):
    torch.manual_seed(0)
    model, batch = Shared(), {"source": IDS[:, :20], "target": IDS[:, :5]}
    halfstep.unit_scale(model, **batch, constraint="to_output", residual=residual)
    values, grads, weights = sizes(model, (), batch)
    assert all(1 / 3 < size < 3 for size in (*values.values(), weights["table.weight"], weights["mix.weight"]))
    assert all(0.1 < size < 3 for size in (*grads.values(), *weights.values()))
    assert max(off_direction(model.double(), (), batch).values()) < 1e-9


def test_the_advice_where_calls_differ_is_not_what_was_followed():
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
    """A model whose one argument is a mapping."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, batch):
        return self.inner(**batch)


def test_a_batch_by_name_is_a_mapping_too():
    batch = {"source": IDS[:, :20], "target": IDS[:, :5]}
    reports = []
    for kind, inputs, named in (
        (Shared(), (), batch),
        (Shared(), (batch,), {}),
        (Shared(), (UserDict(batch),), {}),
        (nn.DataParallel(Shared()), (batch,), {}),  # whose forward takes anything
        (Batched(Shared()), (batch,), {}),
    ):
        report = halfstep.unit_scale(kind, *inputs, **named)
        reports.append([(each.forward, each.backward) for each in report.operations])
    assert all(report == reports[0] for report in reports)
    with pytest.raises(TypeError, match="unexpected keyword argument 'labels'"):
        halfstep.unit_scale(Shared(), batch | {"labels": IDS})
