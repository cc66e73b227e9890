"""docs/knowledge_base.md: its figures equal the data's, and its examples are valid entries."""

import re
from pathlib import Path

from halfstep.kb import load
from halfstep.kb.add import validate


PAGE = (Path(__file__).parents[2] / "docs" / "knowledge_base.md").read_text(encoding="utf-8")


def test_figures_equal_the_data(base):
    counts = base.counts()
    assert f"{counts['definitive']} entries are definitive" in PAGE
    assert f"{counts['inferred']} inferred ones" in PAGE
    assert f"{len(base.failures)} failure reports" in PAGE
    undisclosed = [entry for entry in base.entries if (entry.tier, entry.train_precision) == ("definitive", "unknown")]
    assert len(undisclosed) == 3
    assert "Three of these state that it was never disclosed" in PAGE


def test_examples_are_valid(tmp_path):
    entry, failure = re.findall(r"^```toml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    (tmp_path / "failures").mkdir()
    (tmp_path / "toy.toml").write_text(entry)
    (tmp_path / "failures" / "toy.toml").write_text(failure)
    assert validate(tmp_path, under=load(None)) == []
    assert len(load(tmp_path).entries) == 168
