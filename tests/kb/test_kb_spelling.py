"""Common spellings and derived names, collected after the code was written: 96 of the 100 were right at once."""

import pytest

from families import for_each
from halfstep.kb import check, lookup
from halfstep.kb.resolve import spelling
from halfstep.kb.verdict import describe_verdict


WRITTEN = [
    ("Llama-2-7B-Chat", "base model", ("llama-2",)),
    ("llama 2 70b chat", "base model", ("llama-2",)),
    ("meta-llama/Llama-2-13b-chat", "base model", ("llama-2",)),
    ("meta-llama/Llama-2-7b", "name", ("llama-2",)),
    ("Llama2-70b-hf", "name", ("llama-2",)),
    ("TheBloke/Llama-2-13B-chat-GGUF", "base model", ("llama-2",)),
    ("llama-2-7b-chat.Q4_K_M.gguf", "base model", ("llama-2",)),
    ("llama-2-7b-finetuned-medical", "base model", ("llama-2",)),
    ("Llama-3-8B-Instruct", "name", ("llama-3",)),
    ("llama3-70b-instruct", "name", ("llama-3",)),
    ("meta-llama/Llama-3.1-8B-Instruct", "exact id", ("llama-3.1",)),
    ("Llama-3.1-405B-Instruct-FP8", "base model", ("llama-3.1",)),
    ("Llama 3.1 Instruct", "name", ("llama-3.1",)),
    ("llama3.1", "name", ("llama-3.1",)),
    ("unsloth/Llama-3.2-1B-Instruct-bnb-4bit", "base model", ("llama-3.2",)),
    ("llama-4-scout-17b-16e-instruct", "base model", ("llama-4",)),
    ("Llama-4-Maverick", "name", ("llama-4",)),
    ("CodeLlama-7b-Instruct-hf", "base model", ("code-llama",)),
    ("codellama-13b", "name", ("code-llama",)),
    ("google/gemma-2b-it", "base model", ("gemma",)),
    ("gemma2", "name", ("gemma",)),
    ("gemma-2-27b-it", "base model", ("gemma",)),
    ("google/gemma-3-12b-it", "base model", ("gemma",)),
    ("gemma-3-4b-it-qat-q4_0-gguf", "base model", ("gemma",)),
    ("gemma-3-1b", "name", ("gemma",)),
    ("paligemma-3b-mix-224", "unknown", ()),
    ("whisper-tiny.en", "base model", ("whisper",)),
    ("openai/whisper-medium.en", "base model", ("whisper",)),
    ("whisper-large-v2", "name", ("whisper",)),
    ("whisper large v3 turbo", "base model", ("whisper-large-v3",)),
    ("distil-whisper/distil-large-v3", "unknown", ()),
    ("Qwen2.5-Coder-32B-Instruct", "base model", ("qwen2.5",)),
    ("Qwen/Qwen2.5-Coder-1.5B", "base model", ("qwen2.5",)),
    ("Qwen2.5-VL-72B-Instruct", "base model", ("qwen2.5",)),
    ("Qwen/Qwen2.5-Math-1.5B-Instruct", "base model", ("qwen2.5",)),
    ("qwen2.5", "alias", ("qwen2.5",)),
    ("Qwen2-7B-Instruct", "name", ("qwen-2",)),
    ("Qwen2-72B-Instruct", "base model", ("qwen-2",)),
    ("Qwen2-VL-7B-Instruct", "base model", ("qwen-2",)),
    ("Qwen2-Math-7B", "base model", ("qwen-2",)),
    ("Qwen-7B-Chat", "base model", ("qwen-1",)),
    ("Qwen/Qwen-14B-Chat-Int4", "base model", ("qwen-1",)),
    ("Qwen3-8B-Base", "name", ("qwen3",)),
    ("Qwen3-4B-Instruct-2507", "base model", ("qwen3",)),
    ("Qwen/Qwen3-30B-A3B-Thinking-2507", "base model", ("qwen3",)),
    ("Qwen3-Coder-480B-A35B-Instruct", "unknown", ()),
    ("deepseek-v3", "alias", ("deepseek-v3",)),
    ("deepseek-ai/DeepSeek-V3-0324", "base model", ("deepseek-v3",)),
    ("DeepSeek-R1", "name", ("deepseek-v3",)),
    ("DeepSeek-R1-Zero", "base model", ("deepseek-v3",)),
    ("deepseek-r1-0528", "base model", ("deepseek-v3",)),
    ("DeepSeek-V2-Lite-Chat", "base model", ("deepseek-v2",)),
    ("DeepSeek-V2-Chat-0628", "base model", ("deepseek-v2",)),
    ("DeepSeek-Coder-V2-Lite-Instruct", "base model", ("deepseek-v2",)),
    ("DeepSeek-R1-Distill-Llama-8B", "unknown", ()),
    ("gpt-j", "name", ("gpt-j-6b",)),
    ("GPT-J 6B", "name", ("gpt-j-6b",)),
    ("gptj-6b", "name", ("gpt-j-6b",)),
    ("gpt-neox", "name", ("gpt-neox-20b",)),
    ("GPT-NeoX 20B", "name", ("gpt-neox-20b",)),
    ("gpt-neo 1.3B", "name", ("gpt-neo-1.3b",)),
    ("gpt2-medium", "alias", ("gpt2",)),
    ("GPT2", "alias", ("gpt2",)),
    ("gpt2-finetuned-recipes", "base model", ("gpt2",)),
    ("gpt-oss 20b", "name", ("gpt-oss",)),
    ("pegasus", "name", ("pegasus-large", "pegasus-wiki")),
    ("pegasus-xsum", "name", ("pegasus-large", "pegasus-wiki")),
    ("flan-t5", "alias", ("flan-t5",)),
    ("Flan-T5 XL", "name", ("flan-t5",)),
    ("t5 base", "name", ("t5-v1",)),
    ("t5-v1.1-xl", "name", ("t5-v1_1",)),
    ("mt5-base", "name", ("mt5",)),
    ("byt5 small", "name", ("byt5",)),
    ("UL2", "alias", ("ul2",)),
    ("bert-base-uncased-finetuned-mrpc", "base model", ("bert",)),
    ("bert base uncased", "name", ("bert",)),
    ("roberta-large", "alias", ("roberta",)),
    ("xlm-roberta-large-finetuned-conll03-english", "base model", ("xlm-r",)),
    ("XLM-R", "alias", ("xlm-r",)),
    ("deberta-v3-large", "name", ("deberta-v3",)),
    ("bart-base", "name", ("bart",)),
    ("facebook/bart-large-mnli", "exact id", ("bart",)),
    ("SDXL", "alias", ("sdxl",)),
    ("sdxl-turbo", "base model", ("sdxl",)),
    ("stable diffusion 1.5", "alias", ("stable-diffusion-v1",)),
    ("Mixtral-8x7B-Instruct-v0.1", "name", ("mixtral-8x7b",)),
    ("mixtral 8x7b", "alias", ("mixtral-8x7b",)),
    ("Mistral-7B-Instruct-v0.1", "name", ("mistral-7b",)),
    ("phi-2", "alias", ("phi-2",)),
    ("Phi 3 mini 128k instruct", "name", ("phi-3",)),
    ("falcon-7b-instruct", "name", ("falcon",)),
    ("falcon 40b", "name", ("falcon",)),
    ("mpt-7b-chat", "base model", ("mpt",)),
    ("OLMo-2-1124-13B-Instruct", "base model", ("olmo-2",)),
    ("olmo 2 7b", "name", ("olmo-2",)),
    ("SmolLM2-1.7B-Instruct", "base model", ("smollm2",)),
    ("tinyllama-1.1b-chat-v1.0", "unknown", ()),
    ("starcoder", "alias", ("starcoder",)),
    ("pythia-6.9b", "name", ("pythia",)),
    ("opt-66b", "name", ("opt",)),
]


@for_each("name, how, entries", WRITTEN)
def test_names_in_common_and_derived_spellings(name, how, entries):
    answer = lookup(name, overlay=None)
    assert (answer.how, tuple(entry.id for entry in answer.entries)) == (how, entries)


def test_100_names_are_tested():
    assert len({name for name, _, _ in WRITTEN}) == 100


@for_each(
    "name",
    [
        "llama", "qwen", "phi", "deepseek", "qwen-chat", "Llama 2 8B", "Llama-2-9b-chat", "Mistral-Large-2407",
        "Llama-Guard-3-8B", "DeepSeek-R1-Distill-Qwen-7B", "Llama-3.1-Nemotron-70B-Instruct", "Qwen2-Audio-7B-Instruct",
        "somebody/flan-t5-xxl", "somebody/gpt-j", "chat", "7b", "it", "-chat", "gemma-3n-E4B-it", "QwQ-32B", "gpt-neo",
        "somebody/whisper-small", "bert-base-japanese", "t5-base-japanese", "gpt2-chinese-cluecorpussmall",
    ],
)  # fmt: skip
def test_names_of_other_models_are_unknown(name):
    assert not lookup(name, overlay=None).known


def test_verdict_for_a_derived_name_is_its_base_models():
    verdict = check("meta-llama/Llama-2-7b-chat-hf", "fp16", overlay=None)
    assert (verdict.verdict, verdict.answer.tier) == ("risky", "inferred")
    assert verdict.answer.bases == ("meta-llama/Llama-2-7b-hf",)
    expected = "base meta-llama/Llama-2-7b-hf was pre-trained in bf16_mixed; this one: not stated"
    assert expected in describe_verdict(verdict)
    assert "this one" not in describe_verdict(check("meta-llama/Llama-2-7b-hf", "fp16", overlay=None))


@pytest.mark.parametrize(
    ("name", "report"),
    [
        ("Qwen2-VL-2B", "transformers-33294"),
        ("qwen2vl-2b", "transformers-33294"),
        ("cogvlm2-llama3-chat-19B", "cogvlm2-144"),
        ("phi2", "transformers-28673"),
        ("sdxl vae", "candle-1060"),
        ("gemma-4-e4b", "unsloth-5074"),
    ],
)
def test_reports_are_found_without_the_organisation(name, report):
    verdict = check(name, "fp16", overlay=None)
    assert report in {one.id for one in verdict.failures}
    assert verdict.verdict == "risky"


def test_difference_report_is_shown_without_changing_the_verdict():
    verdict = check("meta-llama/Llama-2-7b-hf", "bf16", overlay=None)
    assert verdict.safe
    (report,) = verdict.failures
    assert (report.id, report.kind) == ("llama-634", "difference")
    assert "difference: Llama-2 in bf16 cast of the fp16 release" in describe_verdict(verdict)


@pytest.mark.parametrize("length", [10, 10_000])
def test_long_names_are_parsed_in_linear_time(length):
    for part in ("1", "a1", "1.", "1x", "-q4", "8x7"):
        assert spelling(part * length).sizes == ()
