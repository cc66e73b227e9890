"""Verdicts for models that users asked about, and how verdicts follow from reasons."""

import pytest
import torch

from halfstep import kb
from halfstep.errors import KnowledgeBaseError
from halfstep.kb.reader import uses
from halfstep.kb.verdict import judge, normal_use


def verdict(model, use):
    return kb.check(model, use=use, overlay=None)


def test_flan_t5_is_risky_in_fp16():
    found = verdict("google/flan-t5-xxl", "fp16")
    assert not found
    assert found.verdict == "risky"
    assert found.references[0].url.startswith("https://huggingface.co/google/flan-t5-xxl")
    assert any("wo" in part for part in found.keep_in_fp32)
    assert {report.kind for report in found.failures} == {"failure", "mitigation"}
    assert [report.kind for report in found.failures] == sorted(report.kind for report in found.failures)
    assert any("65504" in reason.text for reason in found.reasons)
    assert any("fp32" in step for step in found.next_steps)


def test_flan_t5_is_safe_in_bf16():
    found = verdict("google/flan-t5-xxl", "bf16")
    assert found
    assert found.next_steps == ()


def test_llama_2_is_risky_in_fp16_despite_its_stored_dtype():
    found = verdict("meta-llama/Llama-2-7b-hf", "fp16")
    assert found.verdict == "risky"
    assert found.reasons[0].train_precision == "bf16_mixed"
    assert "float16" in found.answer.entries[0].released_dtype


@pytest.mark.parametrize(
    ("use", "vision", "language", "whole"),
    [("fp16", "safe", "risky", "risky"), ("bf16", "risky", "safe", "risky"), ("fp32", "safe", "safe", "safe")],
)
def test_blip_2_is_answered_by_part(use, vision, language, whole):
    found = verdict("Salesforce/blip2-flan-t5-xl", use)
    assert {reason.part: reason.verdict for reason in found.reasons} == {
        "vision_model": vision,
        "language_model": language,
    }
    assert found.verdict == whole


def test_unknown_model_suggests_next_steps():
    found = verdict("foo/bar", "fp16")
    assert found.verdict == "unknown"
    assert not found
    assert found.references == ()
    assert any("record the largest activation" in step for step in found.next_steps)
    assert any("halfstep kb add" in step for step in found.next_steps)


@pytest.mark.parametrize(
    ("model", "use", "expected"),
    [
        ("facebook/galactica-6.7b", "fp16", "safe"),  # measured by the authors
        ("bigcode/santacoder", "fp16", "risky"),  # trained in fp16, but fine-tuning in it fails
        ("Efficient-Large-Model/Sana_1600M_1024px", "bf16", "risky"),  # an fp16-trained model that fails in bf16
        ("bigscience/bloom", "fp16", "risky"),  # one family with two precisions
        ("bigscience/bloom-560m", "fp16", "unknown"),  # trained in fp16, with a reported failure in it
        ("facebook/esm2_t6_8M_UR50D", "fp16", "unknown"),
        ("facebook/opt-1.3b", "fp16", "unknown"),
        ("EleutherAI/gpt-neox-20b", "fp16", "unknown"),
        ("EleutherAI/pythia-1b", "fp16", "risky"),
        ("EleutherAI/pythia-1.4b", "fp16", "unknown"),
        ("huggyllama/llama-7b", "fp16", "unknown"),  # recorded as unknown
        ("huggyllama/llama-7b", "fp32", "safe"),
        ("moonshotai/Kimi-K2-Base", "fp8", "risky"),  # released in fp8, trained in bf16
        ("deepseek-ai/DeepSeek-V3", "fp8", "safe"),
        ("deepseek-ai/DeepSeek-V3", "fp16", "risky"),
        ("state-spaces/mamba-130m", "bf16", "risky"),
        ("google/pegasus-xsum", "fp16", "risky"),
        ("google/pegasus-xsum", "bf16", "safe"),
        ("cerebras/btlm-3b-8k-base", "bf16", "safe"),
    ],
)
def test_models_that_architecture_or_storage_rules_get_wrong(model, use, expected):
    assert verdict(model, use).verdict == expected


def test_verdict_is_the_most_careful_of_its_reasons(base):
    order = ["safe", "unknown", "risky"]
    for entry in base.entries:
        for use in uses():
            found = judge(base, entry.id, use)
            assert found.verdict == max((reason.verdict for reason in found.reasons), key=order.index)
            assert found.safe == all(reason.verdict == "safe" for reason in found.reasons)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_torch_dtypes_are_uses(dtype):
    expected = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
    assert normal_use(dtype) == normal_use(str(dtype).removeprefix("torch.")) == expected


@pytest.mark.parametrize("use", ["bf61", "", "fp64", "int4", "\x1b[31m"])
def test_unknown_use_raises_with_the_known_ones(use):
    with pytest.raises(
        KnowledgeBaseError, match=r"unknown type to run a model in .*Known: bf16, fp16, fp32, fp8, int8"
    ):
        verdict("google/flan-t5-xxl", use)


def test_public_names_are_reached_from_halfstep():
    import halfstep

    assert halfstep.kb.check is kb.check
    assert halfstep.kb.lookup("t5", overlay=None).entries[0].id == "t5-v1"
    assert "kb" in dir(halfstep)
