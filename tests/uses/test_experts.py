"""Mixtures of experts as in transformers."""

import torch
from torch import nn
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from ways import NOWHERE, assert_near_fp32, both, relative_distance, steps, way

from tiny import model_for


class Mixture(nn.Module):
    """Each row goes to two of the first three experts by its index, independent of rounding; the last expert gets
    none."""

    def __init__(self, name):
        super().__init__()
        torch.manual_seed(3)
        config = MixtralConfig(hidden_size=8, intermediate_size=16, num_local_experts=4)
        config._experts_implementation = "grouped_mm"
        self.inner, self.gate, self.experts = nn.Linear(8, 8), nn.Linear(8, 4), MixtralExperts(config)
        for parameter in self.experts.parameters():
            nn.init.normal_(parameter, std=0.3)
        self.head = model_for(name)

    def forward(self, x):
        x = self.inner(x)
        index = torch.arange(len(x))[:, None] % 2 + torch.arange(2)
        weights = self.gate(x).softmax(-1).gather(1, index)
        return self.head(self.experts(x, index, weights))


@way(core=("bf16-mixed", "fp16-master", "fp8-delayed", "fp8-rowwise"))
def test_experts(name):
    """Experts stacked in one parameter, as transformers has them: as always; rules round each expert's matmuls."""
    states = both(name, steps, lambda: Mixture(name))
    assert_near_fp32(name, *states, slack=3)  # 16-bit weights without a master lose small updates
    for key in ("experts.gate_up_proj", "experts.down_proj", "inner.weight"):
        start, found, expected = ({key: state[key]} for state in states)
        assert relative_distance(found, expected, start) < NOWHERE, key
