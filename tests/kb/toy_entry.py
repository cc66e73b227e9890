"""A small valid entry for tests to modify."""

ENTRY = """
[[entry]]
id = "toy"
year = 2024
stage = "pretrain"
train_precision = "bf16_mixed"
tier = "definitive"
evidence_kind = "paper"
model_ids = ["toys/toy-1b"]
paraphrase = "Says bf16."

[[entry.references]]
kind = "paper"
url = "https://arxiv.org/abs/2401.00001"
locator = "section 3"
"""
