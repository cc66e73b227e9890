"""Recommendation: embeddings of users and items, their product and an MLP, on generated ratings."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from halfstep.lab.task import Batch, Facts, Metric, Task, TaskSpec, drawn, part, stream


USERS, ITEMS, TASTES, RATINGS, HELD_OUT = 300, 200, 3, 36_000, 6_000


class Recommender(Task):
    """Does this user like this item: the mean binary cross-entropy in nats.

    Ratings are generated: user and item have three hidden factors each, and the user likes the item with a probability
    that grows with their dot product. A model takes users (batch,) and items (batch,) int64 and returns logits
    (batch,).
    """

    def __init__(self, batch: int) -> None:
        generator = stream(-1, 0)
        pairs = torch.randperm(USERS * ITEMS, generator=generator, dtype=torch.int64, device="cpu")[
            : RATINGS + HELD_OUT
        ]
        users, items = pairs // ITEMS, pairs % ITEMS
        tastes, traits = (
            torch.randn(n, TASTES, generator=generator, dtype=torch.float32, device="cpu") for n in (USERS, ITEMS)
        )
        popular = 0.7 * torch.randn(ITEMS, generator=generator, dtype=torch.float32, device="cpu")
        chance = (1.5 * (tastes[users] * traits[items]).sum(-1) + popular[items]).sigmoid()
        liked = (torch.rand(len(pairs), generator=generator, dtype=torch.float32, device="cpu") < chance).float()
        self.data = {"users": users, "items": items, "liked": liked}
        self.size = batch

    def models(self) -> dict[str, Callable[[], nn.Module]]:
        """neumf: He et al. 2017."""
        return {"neumf": lambda: NeuralFactors(USERS, ITEMS, 16)}

    def batch(self, seed: int, step: int) -> Batch:
        """Random ratings from the training pairs."""
        return part(self.data, drawn(RATINGS, self.size, stream(seed, step)))

    def held_out(self) -> list[Batch]:
        """Pairs of user and item that are not trained on."""
        return [part(self.data, slice(RATINGS, None))]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Binary cross-entropy."""
        return nn.functional.binary_cross_entropy_with_logits(model(batch["users"], batch["items"]), batch["liked"])

    def metric(self, model: nn.Module, losses: Sequence[float]) -> float:
        """AUC on the held-out ratings."""
        (batch,) = self.held_out()
        return auc(model(batch["users"], batch["items"]), batch["liked"])


recommender = TaskSpec(
    name="recommender",
    summary="embeddings and an MLP on made ratings (synthetic)",
    facts=Facts(
        metric=Metric("AUC", higher_is_better=True, best=1.0),
        unit="ratings",
        defaults={"model": "neumf", "steps": 400, "batch": 512, "lr": 5e-3, "warmup": 20, "betas": (0.9, 0.99)},
    ),
    open=lambda experiment: Recommender(experiment.batch),
)


class NeuralFactors(nn.Module):
    """Users (batch,) and items (batch,), int64 -> logits (batch,).

    Source: He et al. 2017, Neural Collaborative Filtering (NeuMF).
    """

    def __init__(self, users: int, items: int, width: int) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(users, 2 * width), nn.Embedding(items, 2 * width)
        for table in (self.users, self.items):
            nn.init.normal_(table.weight, std=0.1)
        self.mlp = nn.Sequential(nn.Linear(2 * width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width), nn.ReLU())
        self.head = nn.Linear(2 * width, 1)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        """The logit of each user liking the item at the same index."""
        user_product, user_mlp = self.users(users).chunk(2, -1)
        item_product, item_mlp = self.items(items).chunk(2, -1)
        deep = self.mlp(torch.cat([user_mlp, item_mlp], -1))
        return self.head(torch.cat([user_product * item_product, deep], -1)).squeeze(-1)  # type: ignore[no-any-return]


def auc(scores: Tensor, labels: Tensor) -> float:
    """The probability that a random positive scores above a random negative, ties counting half; scores and labels
    (n,).

    From the rank sum of the positives (Mann and Whitney 1947). NaN if one of the classes is missing.

    >>> auc(torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([0, 0, 1, 1]))
    0.75
    """
    _, places, counts = torch.unique(scores, return_inverse=True, return_counts=True)
    counts = counts.double()
    ranks = (counts.cumsum(0) - (counts - 1) / 2)[places]  # the mean rank of equal scores
    positive = labels > 0
    n, m = int(positive.sum()), int((~positive).sum())
    return float((ranks[positive].sum() - n * (n + 1) / 2) / (n * m)) if n and m else float("nan")
