"""Random prompts: exact lengths, the same on every machine, and never the same twice where they must be unique."""

from __future__ import annotations

import statistics

import pytest

from benchkit.errors import BadInput, EndpointUnfit
from benchkit.protocol import Cell, Workload
from benchkit.workload.random import NONCE_TOKENS, Vocabulary, bodies, prompt_words, prompts_digest, token_ids
from benchkit.workload.words import CANDIDATES, LETTERS
from samples import protocol_with

VOCABULARY = Vocabulary.of(CANDIDATES, template_tokens=7, ids=None)
CELL = Cell(isl=200, osl=50, kv=0, concurrency=4)


def workload(**changes: object) -> Workload:
    return protocol_with().workload.model_copy(update={"isl": (200,), "osl": (50,), **changes})


def tokens_of(text: str) -> int:
    """One token a word, as the vocabulary promises."""
    return len(text.split(" "))


def test_a_prompt_has_the_length_asked_template_and_nonce_included() -> None:
    work = workload()
    for i, body in enumerate(bodies(work, CELL, 20, VOCABULARY)):
        text = prompt_words(work, VOCABULARY, "run-1", CELL, i, body)
        assert 200 == body.isl == VOCABULARY.template_tokens + tokens_of(text)
        assert 50 == body.osl


def test_the_nonce_is_the_first_tokens_and_differs_by_run_cell_and_index() -> None:
    work = workload()
    body = bodies(work, CELL, 1, VOCABULARY)[0]
    other = Cell(isl=200, osl=50, kv=0, concurrency=8)
    heads = {
        tuple(prompt_words(work, VOCABULARY, run, cell, index, body).split(" ")[:NONCE_TOKENS])
        for run in ("run-1", "run-2")
        for cell in (CELL, other)
        for index in range(500)
    }

    assert 2 * 2 * 500 == len(heads)
    assert all(head[0] in LETTERS for head in heads)


def test_the_text_after_the_nonce_is_the_same_in_every_run() -> None:
    work = workload()
    body = bodies(work, CELL, 1, VOCABULARY)[0]
    first, second = (prompt_words(work, VOCABULARY, run, CELL, 0, body).split(" ") for run in ("run-1", "run-2"))

    assert first[:NONCE_TOKENS] != second[:NONCE_TOKENS]
    assert first[NONCE_TOKENS:] == second[NONCE_TOKENS:]


def test_as_is_sends_the_same_text_in_every_run() -> None:
    work = workload(prefix="as_is")
    body = bodies(work, CELL, 1, VOCABULARY)[0]

    texts = {prompt_words(work, VOCABULARY, run, CELL, 0, body) for run in ("run-1", "run-2")}

    assert 1 == len(texts)
    assert 200 == VOCABULARY.template_tokens + tokens_of(texts.pop())


def test_no_prompt_repeats_within_a_cell_or_between_cells() -> None:
    """Case B26: one seed for all cells must not mean one set of prompts for all cells."""
    work = workload()
    cells = [Cell(isl=200, osl=50, kv=0, concurrency=c) for c in (1, 4, 8)]
    texts = [b.words for c in cells for b in bodies(work, c, 50, VOCABULARY)]

    assert 150 == len(set(texts))
    assert 150 == len({text[:32] for text in texts})


def test_prompt_i_does_not_depend_on_how_many_there_are() -> None:
    work = workload(range_ratio=0.3)

    assert bodies(work, CELL, 3, VOCABULARY) == bodies(work, CELL, 30, VOCABULARY)[:3]


def test_lengths_are_drawn_evenly_from_the_ratios_bounds() -> None:
    work = workload(range_ratio=0.2)
    drawn = bodies(work, CELL, 3000, VOCABULARY)

    assert (160, 240) == (min(b.isl for b in drawn), max(b.isl for b in drawn))
    assert (40, 60) == (min(b.osl for b in drawn), max(b.osl for b in drawn))
    assert 200 == pytest.approx(statistics.mean(b.isl for b in drawn), abs=3)  # 3,000 draws of s = 23.4: se 0.43
    assert set(range(160, 241)) == {b.isl for b in drawn}


@pytest.mark.parametrize(
    ("ratio", "bounds"), [(0.15, (85, 115)), (0.1, (90, 110)), (0.29, (71, 129)), (0.0, (100, 100))]
)
def test_the_bounds_of_a_ratio_are_exact(ratio: float, bounds: tuple[int, int]) -> None:
    """In floats (1 + 0.15) · 100 is a little less than 115."""
    cell = Cell(isl=100, osl=100, kv=0, concurrency=1)
    drawn = [b.osl for b in bodies(workload(range_ratio=ratio), cell, 2000, VOCABULARY)]

    assert bounds == (min(drawn), max(drawn))


def test_the_words_are_pinned_so_that_any_machine_sends_the_same() -> None:
    body = bodies(workload(), CELL, 1, VOCABULARY)[0]

    # First bytes of SHAKE-128 over the key "1|200|50|0|4|0", one word each.
    import hashlib

    stream = hashlib.shake_128(b"1|200|50|0|4|0").digest(5)
    assert tuple(CANDIDATES[b] for b in stream) == body.words[:5]


def test_the_digest_changes_with_any_prompt_or_length() -> None:
    def digest(**changes: object) -> str:
        work = workload(**changes)
        return prompts_digest(work, VOCABULARY, [(CELL, bodies(work, CELL, 5, VOCABULARY))])

    assert digest() == digest(prefix="unique")
    assert 4 == len({digest(), digest(seed=2), digest(range_ratio=0.1), digest(prefix="as_is")})


def test_a_prompt_too_short_for_template_and_nonce_is_refused() -> None:
    short = Cell(isl=15, osl=5, kv=0, concurrency=1)

    with pytest.raises(BadInput, match=r"workload\.isl: expected at least 16 tokens here"):
        bodies(workload(), short, 1, VOCABULARY)
    assert 1 == len(bodies(workload(), Cell(isl=16, osl=5, kv=0, concurrency=1), 1, VOCABULARY)[0].words)


def test_the_vocabulary_is_a_power_of_two_of_the_words_a_server_knows() -> None:
    assert 256 == len(VOCABULARY.words)
    assert 64 == len(Vocabulary.of(CANDIDATES[:100], template_tokens=0, ids=None).words)
    with pytest.raises(EndpointUnfit, match="only 15 known words"):
        Vocabulary.of(CANDIDATES[:15], template_tokens=0, ids=None)


def test_ids_stand_for_the_words() -> None:
    ids = {word: i for i, word in enumerate((*LETTERS, *CANDIDATES))}
    told = Vocabulary.of(CANDIDATES, template_tokens=7, ids=ids)
    work = workload(send="ids")
    body = bodies(work, CELL, 1, told)[0]
    text = prompt_words(work, told, "run-1", CELL, 0, body)

    assert 200 == len(token_ids(told, text))
    assert text.split(" ") == [(*LETTERS, *CANDIDATES)[i] for i in token_ids(told, text)]
