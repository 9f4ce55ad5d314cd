"""The toy tokenizer: its rule by hand, and the way back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchkit.sim.tokens import ID_LIMIT, WORDS, ToyTokenizer, slices


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("Hello world", ["Hello", " world"]),
        ("abcdefgh", ["abcdefgh"]),
        (" abcdefghijklmnopqr", [" abcdefgh", "ijklmnop", "qr"]),
        ("a  b\n\nc", ["a", " ", " b", "\n", "\n", "c"]),
        ("x=12.5", ["x", "=", "1", "2", ".", "5"]),
        ("so 7 §é", ["so", " 7", " §", "é"]),
        ("\u2028 \U0001f642", ["\u2028", " \U0001f642"]),
        ("", []),
    ],
)
def test_text_is_cut_by_the_documented_rule(text: str, pieces: list[str]) -> None:
    tokenizer = ToyTokenizer()

    assert pieces == [tokenizer.decode([token]) for token in tokenizer.encode(text)]


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_any_text_comes_back_from_its_ids(text: str) -> None:
    tokenizer = ToyTokenizer()

    assert text == tokenizer.decode(tokenizer.encode(text))


@given(st.lists(st.integers(0, ID_LIMIT - 1)))
def test_any_ids_come_back_from_their_text(ids: list[int]) -> None:
    tokenizer = ToyTokenizer()

    assert ids == tokenizer.encode(tokenizer.decode(ids))


@given(st.text(alphabet="ab7. \n", max_size=60), st.integers(1, 10))
def test_slices_encode_to_the_ids_of_the_whole(text: str, size: int) -> None:
    tokenizer = ToyTokenizer()
    parts = list(slices(text, size))

    assert text == "".join(parts)
    assert tokenizer.encode(text) == [token for part in parts for token in tokenizer.encode(part)]


def test_ids_are_the_same_in_every_process() -> None:
    assert [0x3610A686] == ToyTokenizer().encode("hello")  # the published crc32 of "hello"


def test_each_spoken_word_is_one_token() -> None:
    tokenizer = ToyTokenizer()

    assert [1] * len(WORDS) == [len(tokenizer.encode(word)) for word in WORDS]
    assert 3 * len(WORDS) == len(tokenizer.encode("".join(WORDS) * 3))
