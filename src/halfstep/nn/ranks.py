"""What a recipe asks of training on several ranks that torch's data parallelism does not do."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from halfstep.errors import ModelError
from halfstep.ops.code_tensor import ranks
from halfstep.recipe import Recipe


def check_ranks(recipe: Recipe, parameters: Iterable[Tensor]) -> None:
    """Called before a model is changed, and before an optimizer is built over its parameters.

    DDP's buckets have the parameters' dtype, and its reducer raises on any other; FSDP2 gives back gradients in the
    parameters' dtype, whatever they accumulated in.

    Raises:
        ModelError: gradients accumulate in another dtype than their parameters', and there are several ranks (or
            sharded parameters).
    """
    if recipe.grads is None or not (ranks() > 1 or any(hasattr(p, "device_mesh") for p in parameters)):
        return
    raise ModelError(
        f"recipe {recipe.name!r} accumulates the gradients of {recipe.weights} weights in {recipe.grads}, and on "
        f"{ranks()} ranks neither DDP nor FSDP2 reduces gradients in another dtype than their parameters'. Under DDP "
        "use 'bf16-master' or 'bf16-mixed'. Under FSDP2 apply 'fp32' and shard with fully_shard(..., "
        "mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)): the sharded fp32 "
        "weights are the master, and gradients accumulate in fp32"
    )
