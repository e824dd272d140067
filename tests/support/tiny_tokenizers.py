"""Small tokenizers of each kind, trained on the spot."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from batchgen_lite.text.sentencepiece_bpe import sentencepiece_backend
from batchgen_lite.text.tokenizer import SpecialTokens, Tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. The capital of France is Paris, isn't it?",
    "def main(argc, argv):\n    return 0  # 12345 numbers\n\n\n",
    "Hé naïve café, straße, größer; 日本語のテキスト and emoji 🙂🙃🙂",
    "User: hello\nAssistant: hello there\nUser: stop",
] * 4
SPECIAL = ["<unk>", "<bos>", "<eos>", "<|im_end|>"]
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"


def train_byte_level() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("<think>", special=False), AddedToken("</think>", special=False)])
    return backend


def write_directory(root: Path, backend: Backend, **config: object) -> Path:
    backend.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", backend.token_to_id("<bos>"))]
    )
    backend.enable_truncation(5)  # as some published files have it; must not cut our prompts
    backend.enable_padding(length=7, pad_id=0, pad_token="<unk>")
    root.mkdir(parents=True, exist_ok=True)
    backend.save(str(root / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": {"__type": "AddedToken", "content": "<eos>", "special": True},
        "unk_token": "<unk>",
        "chat_template": TEMPLATE,
        **config,
    }
    (root / "tokenizer_config.json").write_text(json.dumps(settings))
    return root


def spm_pieces() -> tuple[list[str], list[float]]:
    """Pieces with their scores: specials, bytes, merged pieces, then single characters."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    merged = ["\u2581t", "he", "\u2581the", "er", "\u2581a", "in", "on", "\u2581\u2581", "\u2581c", "st", "\u2581st"]
    merged += ["\u2581sto", "op", "\u2581stop", "ap", "al", "\u2581cap", "it", "\u2581capit", "\u2581capital"]
    singles = sorted(set("".join(CORPUS).replace(" ", "\u2581").replace("\n", "")) - set("日本語🙂🙃"))
    pieces += merged[::-1] + singles  # ids against the order of the scores: only these decide
    scores = (
        [0.0] * 259 + [-float(i) for i in reversed(range(len(merged)))] + [-1000.0 - i for i in range(len(singles))]
    )
    return pieces, scores


def spm_tokenizer() -> Tokenizer:
    pieces, scores = spm_pieces()
    backend = sentencepiece_backend(pieces, scores, unknown=0, add_prefix_space=True)
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<s>", "</s>")])
    return Tokenizer(backend, SpecialTokens(bos=1, eos=2, add_bos=True, eos_ids=frozenset({2})))


def byte_level_tokenizer() -> Tokenizer:
    backend = train_byte_level()
    return Tokenizer(backend, SpecialTokens(bos=1, eos=2, eos_ids=frozenset({2})))


def metaspace_tokenizer() -> Tokenizer:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=SPECIAL, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return Tokenizer(backend, SpecialTokens(bos=1, eos=2, eos_ids=frozenset({2})))
