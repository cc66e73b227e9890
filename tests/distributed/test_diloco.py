"""examples/diloco.py: ranks that train independently for some steps agree after each round, and send the stated
bytes."""

import importlib
import math
import sys
from pathlib import Path

import pytest

from ranks import on_ranks


pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parents[2] / "examples"
SENT = "fp32", "int8", "e3m0", "mxfp4"
ROUNDS = 2


def example():
    sys.path.insert(0, str(EXAMPLES))
    return importlib.import_module("diloco")


def everything(rank):
    diloco = example()
    corpus = diloco.load_corpus(None, diloco.CONTEXT)
    return {way: diloco.train(way, 0, corpus, ROUNDS) for way in (*SENT, "every step")}


def test_outer_gradients_are_sent_in_few_bits(tmp_path):
    ranks = on_ranks(everything, tmp_path)
    for way in SENT:
        (loss, sent), (same, _) = (rank[way] for rank in ranks)
        assert loss == same  # both ranks have the same model
        assert loss < math.log(256) - 0.5  # below the loss of uniform guesses over bytes
        assert sent == pytest.approx(ROUNDS * example().SENT[way].gradients.bytes, rel=0.01)
    assert len({ranks[0][way][0] for way in SENT}) == len(SENT)
    assert ranks[0]["every step"][1] == pytest.approx(4 * ROUNDS * 10, rel=0.01)
