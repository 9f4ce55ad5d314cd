"""Blocks of a README: made again in place, told when they drift, refused where their marks are broken."""

import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchkit.errors import BadInput, Finding
from benchkit.render.readme import block_names, drift, read_markdown, rewrite_file, rewritten

TEXT = "# Title\n\n<!-- benchkit:table one -->\nold\n<!-- /benchkit -->\ntail, no line break"
DONE = "# Title\n\n<!-- benchkit:table one -->\n\n| one |\n| --- |\n\n<!-- /benchkit -->\ntail, no line break"


def table(name: str) -> str:
    return f"| {name} |\n| --- |\n"


def test_what_stands_between_the_marks_is_replaced_and_nothing_else():
    assert DONE == rewritten(TEXT, table)
    assert DONE == rewritten(DONE, table)


def test_a_file_of_crlf_keeps_its_line_ends():
    crlf = TEXT.replace("\n", "\r\n")

    assert DONE.replace("\n", "\r\n") == rewritten(crlf, table)
    assert () == drift(DONE.replace("\n", "\r\n"), table)


@given(st.lists(st.sampled_from(["text", "", "\u2028x", "# h", "- a", "> q", "<!-- other -->"])), st.booleans())
def test_rewriting_twice_is_rewriting_once_and_spares_what_is_around(around, crlf):
    text = "\n".join([*around, "<!-- benchkit:table a -->", "<!-- /benchkit -->", *around])
    text = text.replace("\n", "\r\n") if crlf else text

    once = rewritten(text, table)

    assert once == rewritten(once, table)
    assert () == drift(once, table)
    head, _, rest = text.partition("<!-- benchkit:table a -->")
    assert once.startswith(head)
    assert once.endswith(rest.partition("<!-- /benchkit -->")[2])


def test_an_indented_block_stays_in_its_list():
    text = "- item\n\n  <!-- benchkit:table one -->\n  <!-- /benchkit -->\n"

    assert ("- item\n\n  <!-- benchkit:table one -->\n\n  | one |\n  | --- |\n\n  <!-- /benchkit -->\n") == rewritten(
        text, table
    )


def test_marks_in_a_code_block_and_in_a_sentence_are_text():
    text = (
        "````\n```\n<!-- benchkit:table x -->\n````\n"
        "Write `<!-- benchkit:table x -->`.\n~~~ md\n<!-- /benchkit -->\n~~~\n"
    )

    assert () == block_names(text)
    assert text == rewritten(text, table)


def test_a_fence_inside_a_block_is_content():
    assert ("one",) == block_names("<!-- benchkit:table one -->\n```\n<!-- /benchkit -->\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\n<!-- benchkit:table one -->\n", "R.md:2: block one is not closed; end it with <!-- /benchkit -->"),
        ("<!-- /benchkit -->", "R.md:1: <!-- /benchkit --> without a block before it"),
        (
            "<!-- benchkit:table one -->\n<!-- benchkit:table two -->\n<!-- /benchkit -->",
            "R.md:2: block two opens inside block one of line 1",
        ),
        (
            "a\n<!-- benchkit:tabel one -->",
            "R.md:2: expected <!-- benchkit:table NAME --> or <!-- /benchkit --> alone on its line, "
            "found <!-- benchkit:tabel one -->",
        ),
        (
            "<!-- benchkit:table one --> x",
            "R.md:1: expected <!-- benchkit:table NAME --> or <!-- /benchkit --> alone on its line, "
            "found <!-- benchkit:table one --> x",
        ),
    ],
)
def test_broken_marks_are_named_by_file_and_line_before_any_table_is_made(text, message):
    made = []

    with pytest.raises(BadInput) as error:
        rewritten(text, made.append, "R.md")

    assert message == str(error.value)
    assert [] == made


def test_a_table_that_cannot_be_made_names_the_block_that_asks_for_it():
    def fails(name: str) -> str:
        raise Finding(f"{name}: no reps")

    with pytest.raises(Finding, match=r"^README\.md:3: one: no reps$"):
        rewritten(TEXT, fails)


def test_drift_names_block_and_line_and_shows_what_changed():
    (found,) = drift(DONE.replace("| one |", "| 1 |"), table)

    assert ("one", 3) == (found.name, found.line)
    assert (
        "--- one in the file\n+++ one from the ledger\n@@ -1,3 +1,3 @@\n \n-| 1 |\n+| one |\n | --- |"
    ) == found.diff


def test_drift_shows_twenty_lines_and_counts_the_rest():
    (found,) = drift(TEXT, lambda _: "\n".join(f"line {i}" for i in range(40)))

    # Two names, a place, one line gone, 42 new ones (two of them blank).
    assert 21 == len(found.diff.splitlines())
    assert found.diff.endswith("\n… 26 more lines")


def test_drift_of_line_ends_alone_is_told_in_words():
    (found,) = drift(DONE.replace("| one |\n", "| one |\r\n"), table)

    assert "only line ends differ" == found.diff


def test_a_file_is_written_only_where_it_changes_and_keeps_its_mode(tmp_path):
    path = tmp_path / "README.md"
    path.write_bytes(TEXT.encode())
    path.chmod(0o640)
    link = tmp_path / "LINK.md"
    link.symlink_to(path)

    assert rewrite_file(link, table)
    assert DONE.encode() == path.read_bytes()
    assert 0o640 == stat.S_IMODE(path.stat().st_mode)
    assert link.is_symlink()
    before = path.stat().st_mtime_ns
    assert not rewrite_file(path, table)
    assert before == path.stat().st_mtime_ns
    assert ["LINK.md", "README.md"] == sorted(path.name for path in tmp_path.iterdir())


def test_a_file_that_is_not_there_or_no_text_is_bad_input(tmp_path):
    (tmp_path / "x.md").write_bytes(b"\xff\xfe")

    with pytest.raises(BadInput, match=r"none\.md: No such file or directory"):
        read_markdown(tmp_path / "none.md")
    with pytest.raises(BadInput, match=r"x\.md: not UTF-8 text"):
        read_markdown(tmp_path / "x.md")
