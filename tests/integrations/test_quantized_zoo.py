"""Hugging Face models quantized for inference give the same outputs as in evaluation under the recipe."""

import copy

import pytest
import torch
from zoo import MEMBERS

import halfstep
from halfstep.memory import stored_bytes
from tiny import assert_same


def outputs(model, batch):
    with torch.no_grad():
        found = model(**{key: value for key, value in batch.items() if key != "labels"})
    return getattr(found, "logits", found[0])


@pytest.mark.quick("llama-fp8-current", "opt-fp8-current")
@pytest.mark.parametrize("name", ["fp8-current", pytest.param("fp8-block", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", MEMBERS)
def test_quantized_outputs_equal_evaluation_under_the_recipe(kind, name):
    member = MEMBERS[kind]
    model = member.build().eval()
    twin, before = copy.deepcopy(model), stored_bytes(model)
    report = halfstep.quantize_model(model, name)
    halfstep.apply(twin, name)
    batch = {key: value for key, value in member.batch().items() if key != "labels"}
    if "decoder_input_ids" not in batch and model.config.is_encoder_decoder:
        batch["decoder_input_ids"] = member.batch()["labels"]
    assert_same(outputs(model, batch), outputs(twin.eval(), batch))
    assert report.quantized
    assert stored_bytes(model) < before
