"""Whether a graph is traced, asked within a graph and between two."""

import pytest
import torch

from halfstep.quant.tracing import has_memory


@pytest.fixture(autouse=True)
def _anew():
    torch._dynamo.reset()


def test_between_two_graphs_nothing_is_traced():
    @torch._dynamo.disable(
        recursive=False
    )  # as a function whose graph broke: itself it runs, what it calls may compile
    def between(x):
        return has_memory(x)

    found = []
    torch.compile(lambda x: found.append(between(x.neg())), backend="eager")(torch.ones(2))
    assert found == [True]


def test_within_a_graph_no_tensor_has_memory():
    negated = torch.compile(lambda x: x if has_memory(x) else -x, backend="eager", fullgraph=True)
    assert torch.equal(negated(torch.ones(2)), -torch.ones(2))
