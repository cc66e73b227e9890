"""Run by test_trainer.py on two ranks: `torchrun --nproc-per-node=2 trainer_on_ranks.py RECIPE FOLDER`."""

import io
import sys
from pathlib import Path

import torch
import torch.distributed as dist


sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from trainers import state_of, trainer  # noqa: E402

from tiny import assert_same  # noqa: E402


def main(recipe, folder):
    """Only rank 1 overflows in the third step, and both skip it; the run resumed halfway ends like the whole one."""
    torch.set_num_threads(1)
    runs = []
    for resume in (None, f"{folder}/checkpoint-4"):
        trained = trainer(recipe, folder, save_strategy="steps", save_steps=4, ddp_backend="gloo")

        def spoil(grad, trained=trained):
            return grad / 0 if trained.state.global_step == 2 and dist.get_rank() == 1 else grad

        if recipe == "fp16-mixed":
            trained.model.lm_head.weight.register_hook(spoil)
        trained.train(resume_from_checkpoint=resume)
        runs.append(state_of(trained))
        if recipe == "fp16-mixed":
            assert trained.scaler.get_scale() == 2.0**15
    assert_same(*runs)
    everyone, file = [None, None], io.BytesIO()
    torch.save(runs[0], file)  # torch cannot load a plain pickle of a float8 tensor
    dist.all_gather_object(everyone, file.getvalue())
    assert_same(*(torch.load(io.BytesIO(one), weights_only=False) for one in everyone))
    print("alike", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
