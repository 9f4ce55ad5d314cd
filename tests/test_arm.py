"""Arm files, and the hash within which reps pool."""

from __future__ import annotations

import pytest

from benchkit.arm import arm_hash, parse_arm
from benchkit.errors import BadInput

FULL = """
schema = 1
name = "w4a16-mtp"
title = "W4A16 + MTP N=2"
model = "glm53-w4"
endpoints = ["http://127.0.0.1:8000/v1"]
engine = "vllm"
api = "chat"
api_key_env = "OPENAI_API_KEY"

[request]
extra_body = {}
headers_env = {}

[facts]
checkpoint = "canada-quant/GLM-5.3-Flash-W4A16-MTP"
quantization = "W4A16"
tensor_parallel = 4

[launch]
command = "vllm serve …"
ready_timeout_s = 1800
"""
TOLD = {"version": "0.26.0", "max_model_len": 8192}


def hash_of_text(text: str, told: dict[str, object] = TOLD) -> str:
    return arm_hash(parse_arm(text), told)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"w4a16-mtp"', '"other-name"'),
        ("W4A16 + MTP N=2", "Other words"),
        ("http://127.0.0.1:8000/v1", "https://elsewhere.example/v1"),
        ('"OPENAI_API_KEY"', '"ANOTHER_KEY"'),
    ],
)
def test_where_an_arm_is_and_what_it_is_called_does_not_change_its_hash(old: str, new: str) -> None:
    assert hash_of_text(FULL) == hash_of_text(FULL.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"glm53-w4"', '"glm53-w8"'),
        ('"vllm"', '"sglang"'),
        ('"chat"', '"completions"'),
        ("tensor_parallel = 4", "tensor_parallel = 8"),
        ("vllm serve …", "vllm serve --other"),
        ("extra_body = {}", "extra_body = { top_k = 1 }"),
    ],
)
def test_what_an_arm_is_changes_its_hash(old: str, new: str) -> None:
    assert hash_of_text(FULL) != hash_of_text(FULL.replace(old, new))


def test_what_the_server_tells_changes_its_hash() -> None:
    assert hash_of_text(FULL) != hash_of_text(FULL, {**TOLD, "version": "0.26.1"})


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("endpoints = [", 'endpoints = ["localhost:8000", ', "endpoints: expected URLs like"),
        ("http://127.0.0.1", "http://user:secret@127.0.0.1", "endpoints: expected URLs without a user or password"),
        ("8000/v1", "8000/v1?key=1", "endpoints: expected URLs without a query"),
        ('["http://127.0.0.1:8000/v1"]', "[]", r"endpoints: expected at least 1 value, found \[\]"),
        ('model = "glm53-w4"', 'model = ""', "model: expected a text that is not empty"),
        ('engine = "vllm"', 'engine = "vlm"', 'engine: expected "auto", "vllm"'),
        ("tensor_parallel = 4", "tensor_parallel = [4]", "facts.tensor_parallel"),
    ],
)
def test_a_fault_is_named(old: str, new: str, message: str) -> None:
    with pytest.raises(BadInput, match=rf"^a\.toml: {message}"):
        parse_arm(FULL.replace(old, new), "a.toml")


def test_a_secret_in_a_url_is_not_repeated_in_the_message() -> None:
    with pytest.raises(BadInput) as caught:
        parse_arm(FULL.replace("http://127.0.0.1", "http://user:hunter2@127.0.0.1"), "a.toml")

    assert "hunter2" not in str(caught.value)
