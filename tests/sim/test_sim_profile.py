"""A profile is checked when it is made, and a bad one is told in one line."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from benchkit.sim.__main__ import read_settings
from benchkit.sim.process import command
from benchkit.sim.profile import FAULTS, Profile, describe_keys, read_profile


def test_a_toml_file_is_read_and_single_keys_are_replaced(tmp_path: Path) -> None:
    file = tmp_path / "sim.toml"
    file.write_text('model = "m"\nstep_base_s = 1\nacceptance = [1, 0.5]\n')

    profile = read_profile(file, {"seed": 7})

    assert Profile(model="m", step_base_s=1.0, acceptance=(1.0, 0.5), seed=7) == profile
    assert isinstance(profile.step_base_s, float)


def test_a_json_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "sim.json"
    file.write_text('{"max_num_seqs": 3}')

    assert Profile(max_num_seqs=3) == read_profile(file)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('step_base_s = "fast"', "step_base_s: expected a number ≥ 0, found 'fast'"),
        ("step_base_s = -1", "step_base_s: expected a number ≥ 0, found -1"),
        ("step_base_s = nan", "step_base_s: expected a number ≥ 0, found nan"),
        ("seed = 1.5", "seed: expected an integer, found 1.5"),
        ("block_size = true", "block_size: expected an integer ≥ 1, found True"),
        ("metrics = 1", "metrics: expected true or false, found 1"),
        ("acceptance = [0.5, 2]", "acceptance: expected a list of numbers ≥ 0 and ≤ 1, found [0.5, 2]"),
        ('usage_mode = "all"', "usage_mode: expected one of final, none, forced, finish, found 'all'"),
        ("step_bas_s = 1", "step_bas_s: expected a key of the profile (nearest: step_base_s), found an unknown one"),
        (
            "tokens_per_step = 2\nacceptance = [0.5]",
            "tokens_per_step: expected 1 where acceptance is given, found 2",
        ),
    ],
)
def test_a_bad_key_is_named_with_file_expected_and_found(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "sim.toml"
    file.write_text(line)

    with pytest.raises(ValueError, match=f"^{re.escape(f'{file}: {message}')}$"):
        read_profile(file)


def test_a_file_that_is_not_toml_is_named(tmp_path: Path) -> None:
    file = tmp_path / "sim.toml"
    file.write_text("seed 1")

    with pytest.raises(ValueError, match=f"^{re.escape(str(file))}: expected toml, found: "):
        read_profile(file)


def test_keywords_are_checked_like_a_file() -> None:
    with pytest.raises(ValueError, match=r"^profile: max_num_seqs: expected an integer ≥ 1, found 0$"):
        Profile(max_num_seqs=0)


def test_the_command_line_carries_a_profile_whole() -> None:
    profile = Profile(model='a "b"', acceptance=(0.5, 0.25), prefix_caching=False, step_base_s=1e-3)
    words = command(profile)

    settings = [word for before, word in itertools.pairwise(words) if before == "--set"]

    assert profile == read_profile(None, read_settings(settings))


def test_every_fault_has_its_key_in_the_help() -> None:
    text = describe_keys()

    assert 15 == len(FAULTS)
    assert all(f"fault_{name}_every = 0" in text for name in FAULTS)
