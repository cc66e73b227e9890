"""A small GPT with a mixture of experts in every other block: a Switch Transformer with one expert per token.

The recipe sets the router's precision: under bf16-mixed its scores, their softmax and the gates are bfloat16, and
`float32_modules=("*.router",)` in a recipe is the paper's selective precision.

Sources: Fedus, Zoph and Shazeer 2021, arXiv 2101.03961; Qiu et al. 2025, arXiv 2501.11873.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep.lab.models import gpt


BALANCE = 0.01
"""The weight of the balance loss in `Output.balance_loss` (alpha in Fedus et al.)."""


class Routing(NamedTuple):
    """A router's decisions for a batch of tokens."""

    probabilities: Tensor
    """(tokens, experts): the softmax of the scores."""
    chosen: Tensor
    """(tokens, slots) int64: the experts of each token, most probable first, before any is dropped."""


class Output(NamedTuple):
    """The output of a model with experts."""

    logits: Tensor
    """(batch, time, vocabulary)."""
    balance_loss: Tensor
    """The term to add to the loss in training: `BALANCE` times `balance` over the batch, summed over the mixtures."""
    routing: tuple[Routing, ...]
    """One entry per mixture."""


def counted(routing: Routing, groups: int = 1) -> Tensor:
    """How often each expert was chosen, in each of `groups` equal parts of the tokens: (groups, experts) float32."""
    return F.one_hot(routing.chosen.reshape(groups, -1), routing.probabilities.shape[-1]).sum(1).float()


def balance(routing: Routing, counts: Tensor) -> Tensor:
    """N sum_i f_i P_i, the mean over groups: f the shares of the experts in `counts`, P their mean probabilities.

    It is 1 if experts are equally loaded and N if one takes all. With the counts of each group it balances each group
    (eq. 3 of Qiu et al.); with their sum for all groups, it balances the sum (eq. 6). Its gradient flows through P.

    Args:
        counts: (groups, experts), of consecutive groups with equally many tokens.
    """
    groups, experts = counts.shape
    mean = routing.probabilities.float().view(groups, -1, experts).mean(1)
    return experts * (counts / counts.sum(-1, keepdim=True) * mean).sum(-1).mean()


def within(chosen: Tensor, experts: int, capacity: int) -> Tensor:
    """chosen (tokens, slots) with only the first `capacity` entries of each expert; others become `experts`, which
    means none.

    First choices come before second ones, tokens in their order. Counted in int64: bfloat16 counts to 256.
    """
    flat = chosen.t().reshape(-1)
    taken = F.one_hot(flat, experts)
    place = (taken.cumsum(0) - taken).gather(1, flat[:, None])[:, 0]
    return flat.masked_fill(place >= capacity, experts).view(chosen.shape[::-1]).t()


class Router(nn.Module):
    """Scores tokens for experts. A separate module, so that a recipe's rules can name it."""

    def __init__(self, width: int, experts: int, slots: int) -> None:
        super().__init__()
        self.slots = slots
        self.scores = nn.Linear(width, experts, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x (tokens, width) -> probabilities (tokens, experts), gates and indices (tokens, slots)."""
        scores = self.scores(x)
        probabilities = scores.softmax(-1, dtype=scores.dtype)
        gates, chosen = probabilities.topk(self.slots, -1)
        if self.slots > 1:  # with one slot a normalised gate would be 1, and the router would get no gradient
            gates = gates / gates.sum(-1, keepdim=True)
        return probabilities, gates, chosen


class Experts(nn.Module):
    """All experts' weights in two parameters, in transformers' layout, so that recipes round their matmuls as in its
    models."""

    has_gate = has_bias = is_transposed = is_concatenated = False

    def __init__(self, width: int, inner: int, experts: int, dropout: float) -> None:
        super().__init__()
        self.num_experts = experts
        self.up_proj = nn.Parameter(
            torch.empty(experts, inner, width, dtype=torch.float32, device=torch.get_default_device())
        )
        self.down_proj = nn.Parameter(
            torch.empty(experts, width, inner, dtype=torch.float32, device=torch.get_default_device())
        )
        self.act_fn = nn.Sequential(nn.ReLU(), nn.Dropout(dropout))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The weighted sum of each token's experts; an index equal to the number of experts means no expert."""
        total = torch.zeros_like(hidden_states)
        for expert, (up, down) in enumerate(zip(self.up_proj.unbind(), self.down_proj.unbind(), strict=True)):
            token, slot = torch.where(top_k_index == expert)
            output = F.linear(self.act_fn(F.linear(hidden_states[token], up)), down)
            total = total.index_add(0, token, (output * top_k_weights[token, slot, None]).to(total.dtype))
        return total


class Mixture(nn.Module):
    """A router and its experts, in place of an MLP."""

    def __init__(self, width: int, experts: int, slots: int, capacity: float | None, dropout: float) -> None:
        super().__init__()
        self.capacity = capacity
        self.router = Router(width, experts, slots)
        self.experts = Experts(width, 4 * width, experts, dropout)

    def forward(self, x: Tensor) -> tuple[Tensor, Routing]:
        """x (batch, time, width) -> the same shape, and the routing of its tokens."""
        tokens = x.flatten(0, 1)
        probabilities, gates, chosen = self.router(tokens)
        kept, experts = chosen, self.experts.num_experts
        if self.training and self.capacity is not None:
            kept = within(chosen, experts, int(chosen.numel() * self.capacity / experts))
        return self.experts(tokens, kept, gates).view_as(x), Routing(probabilities, chosen)


class Block(gpt.Block):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def forward(self, x: Tensor) -> tuple[Tensor, Routing | None]:  # type: ignore[override]
        """One block of the residual stream, and the routing of its tokens."""
        x = x + self.attention(self.norm1(x))
        made = self.mlp(self.norm2(x))
        change, routing = made if isinstance(self.mlp, Mixture) else (made, None)
        return x + change, routing


class MoE(nn.Module):
    """Tokens (batch, time) int64 -> `Output`."""

    def __init__(
        self,
        vocabulary: int,
        context: int,
        layers: int,
        width: int,
        heads: int,
        *,
        experts: int = 8,
        slots: int = 1,
        capacity: float | None = None,
        scale: float = 0.1,
        dropout: float = 0.0,
        expert_dropout: float = 0.0,
    ) -> None:
        """A model whose weights are drawn from a normal distribution with variance scale / fan-in, truncated at two
        deviations.

        Args:
            experts: the number in the second, fourth ... block; with one, their MLPs equal those of the other blocks.
            slots: how many experts a token goes to.
            capacity: in training an expert takes at most this many times its equal share of a batch's tokens; others
                bypass it on the residual stream. None: no limit.
            dropout: of the inner activations of the other MLPs; `expert_dropout` of the experts'.
        """
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(
            Block(
                width,
                heads,
                Mixture(width, experts, slots, capacity, expert_dropout)
                if i % 2 and experts > 1
                else _mlp(width, dropout),
            )
            for i in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if name.startswith(("token", "position")):
                nn.init.normal_(parameter, std=0.02)
            elif parameter.dim() > 1:
                std = (scale / parameter.shape[-1]) ** 0.5
                nn.init.trunc_normal_(parameter, std=std, a=-2 * std, b=2 * std)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Output:
        """The logits of the next token at each position, and the routers' decisions."""
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device, dtype=torch.int64))
        routing = []
        for block in self.blocks:
            x, found = block(x)
            if found is not None:
                routing.append(found)
        loads = [balance(found, counted(found)) for found in routing]
        total = torch.stack(loads).sum() if loads else x.new_zeros((), dtype=torch.float32)
        return Output(self.head(self.norm(x)), BALANCE * total, tuple(routing))


def _mlp(width: int, dropout: float) -> nn.Module:
    """down(dropout(relu(up(x)))), without biases: an expert."""
    up, down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
    return nn.Sequential(up, nn.ReLU(), nn.Dropout(dropout), down)
