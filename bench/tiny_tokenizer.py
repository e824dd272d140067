"""A byte-level tokenizer of any vocabulary size, for checkpoints with random weights.

Every byte is a token, so any text can be encoded; the rest of the vocabulary are made-up words of two and three
letters, which text never encodes to (there are no merges) but which generated ids decode to.
"""

from __future__ import annotations

import json
from itertools import chain, islice, product
from pathlib import Path
from string import ascii_lowercase

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

END_OF_TEXT, START_OF_TURN, END_OF_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIALS = (END_OF_TEXT, START_OF_TURN, END_OF_TURN)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def vocabulary(size: int) -> list[str]:
    """Specials, the 256 bytes, then words with and without a leading space (written "Ġ"); ``size`` of them."""
    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ("".join(letters) for length in (2, 3, 4) for letters in product(ascii_lowercase, repeat=length))
    spaced = chain.from_iterable(("Ġ" + word, word) for word in words)
    tokens = [*SPECIALS, *bytes_, *islice(spaced, max(0, size - len(SPECIALS) - len(bytes_)))]
    if len(tokens) != size:
        least = len(SPECIALS) + len(bytes_)
        raise SystemExit(f"vocabulary of {size}: it must hold the {least} tokens for specials and bytes at least")
    return tokens


def write_tokenizer(output: Path, size: int) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``."""
    tokens = vocabulary(size)
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIALS])
    tokenizer.save(str(output / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TURN,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (output / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
