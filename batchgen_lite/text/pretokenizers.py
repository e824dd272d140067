"""Pre-tokenizers by their GGUF name: how text is cut into words before byte-pair merging.

A GGUF file names its pre-tokenizer (``tokenizer.ggml.pre``) instead of describing it. Each name below stands for the
pipeline of the original model's tokenizer.json, which is what the merges were trained with; the names are those that
llama.cpp's converter writes. A name that is not listed is refused: a wrong split gives plausible, wrong tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tokenizers import Regex, normalizers
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Punctuation, Sequence, Split

from batchgen_lite.errors import TokenizerError

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"

_CL100K = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_SYMBOLS}|{_SPACES}"
_QWEN2 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_SYMBOLS}|{_SPACES}"
_QWEN35 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_SEED_CODER = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"

# Words whose case changes from upper to lower at most once (o200k and tekken).
_UPPER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
_LOWER = r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_CASED_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_TEKKEN = rf"{_LEAD}[{_UPPER}]*[{_LOWER}]+|{_LEAD}[{_UPPER}]+[{_LOWER}]*|\p{{N}}|{_CASED_SYMBOLS}|{_SPACES}"
_O200K = (
    rf"{_LEAD}[{_UPPER}]*[{_LOWER}]+{_CONTRACTION}?|{_LEAD}[{_UPPER}]+[{_LOWER}]*{_CONTRACTION}?"
    rf"|\p{{N}}{{1,3}}|{_CASED_SYMBOLS}|{_SPACES}"
)

_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK_V3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
_CJK_HANGUL = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
# The cased letters, as the ranges in DeepSeek's tokenizer.json; by code point because normalisation would merge some.
_DEEPSEEK_LETTER_RANGES = (
    "41-5a 61-7a b5 c0-d6 d8-f6 f8-1ba 1bc-1bf 1c4-293 295-2af 370-373 376 377 37b-37d 37f 386 388-38a 38c "
    "38e-3a1 3a3-3f5 3f7-481 48a-52f 531-556 10a0-10c5 13a0-13f5 13f8-13fd 1c90-1cba 1cbd-1cbf 1d00-1d2b "
    "1d6b-1d77 1d79-1d9a 1e00-1f15 1f18-1f1d 1f20-1f45 1f48-1f4d 1f50-1f57 1f59 1f5b 1f5d 1f5f-1f7d 1f80-1fb4 "
    "1fb6-1fbc 1fbe 1fc2-1fc4 1fc6-1fcc 1fd0-1fd3 1fd6-1fdb 1fe0-1fec 1ff2-1ff4 1ff6-1ffc 2102 2107 210a-2113 "
    "2115 2119-211d 2124 2126 2128 212a-212d 212f-2134 2139 213c-213f 2145-2149 214e 2183 2184 2c00-2c7b "
    "2c7e-2ce4 2ceb-2cee 2cf2 2cf3 a640-a66d a680-a69b a722-a76f a771-a787 a78b-a78e ab70-abbf fb00-fb06 "
    "fb13-fb17 ff21-ff3a ff41-ff5a 10400-1044f 104b0-104d3 104d8-104fb 10c80-10cb2 10cc0-10cf2 118a0-118df "
    "1e900-1e943"
)
_DEEPSEEK_LETTERS = "".join(
    "-".join(chr(int(point, 16)) for point in item.split("-")) for item in _DEEPSEEK_LETTER_RANGES.split()
)
_DEEPSEEK_SYMBOLS = "!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002"
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"


@dataclass(frozen=True, slots=True)
class PreTokenization:
    """A pre-tokenizer with what goes with its name: ``nfc`` normalisation of the text, ``ignore_merges`` (a word that
    is itself a token is taken whole), ``add_bos`` where the file does not say."""

    build: Callable[[], PreTokenizer]
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False

    def normalizer(self) -> Normalizer | None:
        return normalizers.NFC() if self.nfc else None


def _splits(*patterns: str) -> Callable[[], PreTokenizer]:
    """Cut at every match of each pattern in turn, keeping matches as words of their own; then bytes."""

    def build() -> PreTokenizer:
        steps: list[PreTokenizer] = [Split(Regex(p), behavior="isolated") for p in patterns]
        return Sequence([*steps, ByteLevel(add_prefix_space=False, use_regex=False)])

    return build


def _gpt2() -> PreTokenizer:
    return ByteLevel(add_prefix_space=False, use_regex=True)


def _digits_gpt2() -> PreTokenizer:
    return Sequence([Digits(individual_digits=True), _gpt2()])


def _falcon() -> PreTokenizer:
    triples = Split(Regex("[0-9][0-9][0-9]"), behavior="isolated")
    return Sequence([Punctuation(behavior="contiguous"), _gpt2(), Digits(individual_digits=False), triples])


_GPT2 = PreTokenization(_gpt2)
_DIGITS = PreTokenization(_digits_gpt2)
_LLAMA3 = PreTokenization(_splits(_CL100K), ignore_merges=True, add_bos=True)
_CL100K_PLAIN = PreTokenization(_splits(_CL100K))
_QWEN = PreTokenization(_splits(_QWEN2), nfc=True)
_QWEN_PLAIN = PreTokenization(_splits(_QWEN2))
_DEEPSEEK3 = PreTokenization(_splits(r"\p{N}{1,3}", _CJK, _DEEPSEEK_V3))
_GPT4O = PreTokenization(_splits(_O200K))
_BLOOM_LIKE = PreTokenization(_splits(_BLOOM))
_BAILING_LIKE = PreTokenization(_splits(_BAILING))

_BY_NAME: dict[str, PreTokenization] = {
    **dict.fromkeys(["gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum", "exaone4", "mpt", "jais", "trillion"], _GPT2),
    **dict.fromkeys(["granite-docling", "modern-bert"], _GPT2),
    "olmo": PreTokenization(_gpt2, nfc=True),
    **dict.fromkeys(["starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b"], _DIGITS),
    "mellum2": _DIGITS,
    **dict.fromkeys(["llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral"], _LLAMA3),
    **dict.fromkeys(["midm-2.0", "lfm2"], _LLAMA3),
    **dict.fromkeys(["dbrx", "smaug-bpe", "glm4", "chatglm-bpe"], _CL100K_PLAIN),
    **dict.fromkeys(["qwen2", "megrez"], _QWEN),
    **dict.fromkeys(["deepseek-r1-qwen", "kormo", "stablelm2", "hunyuan", "solar-open", "grok-2"], _QWEN_PLAIN),
    "qwen35": PreTokenization(_splits(_QWEN35), nfc=True),
    **dict.fromkeys(["deepseek-v3", "hunyuan-dense", "joyai-llm"], _DEEPSEEK3),
    "deepseek-llm": PreTokenization(
        _splits(
            r"[\r\n]",
            rf"\s?[{_DEEPSEEK_LETTERS}]+",
            rf"\s?[{_DEEPSEEK_SYMBOLS}]+",
            r"\s+$",
            _CJK_HANGUL,
            r"\p{N}",
        )
    ),
    "deepseek-coder": PreTokenization(_splits(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK_HANGUL, r"\p{N}")),
    **dict.fromkeys(["gpt-4o", "llama4", "kanana2", "minimax-m2"], _GPT4O),
    "tekken": PreTokenization(_splits(_TEKKEN), ignore_merges=True, add_bos=True),
    "falcon": PreTokenization(_falcon),
    **dict.fromkeys(["bloom", "poro-chat", "gpt3-finnish"], _BLOOM_LIKE),
    "viking": PreTokenization(_splits(_BLOOM, r"\p{N}")),
    **dict.fromkeys(["bailingmoe", "bailingmoe2", "llada-moe"], _BAILING_LIKE),
    "seed-coder": PreTokenization(_splits(_SEED_CODER)),
}


def pretokenization(name: str | None) -> PreTokenization:
    """The pre-tokenizer of a GGUF file. Raises TokenizerError, which names it, when it is missing or unknown."""
    if name is None:
        raise TokenizerError(
            "the GGUF file does not name its pre-tokenizer (tokenizer.ggml.pre): it was made by an old converter, and "
            "its text would be split wrongly; convert the model again or use a newer file"
        )
    if name not in _BY_NAME:
        raise TokenizerError(
            f"unknown pre-tokenizer {name[:80]!r} (tokenizer.ggml.pre); known are {', '.join(sorted(_BY_NAME))}. "
            "Use the safetensors form of the model, whose tokenizer.json describes the split"
        )
    return _BY_NAME[name]


def known_pretokenizers() -> tuple[str, ...]:
    """Every name that ``pretokenization`` accepts."""
    return tuple(sorted(_BY_NAME))
