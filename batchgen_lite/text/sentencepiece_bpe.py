"""SentencePiece's BPE on the ``tokenizers`` library: merges rebuilt from scores, spaces as ``▁``, bytes as fallback.

SentencePiece joins, again and again, the adjacent pair whose union is the piece with the best score, leftmost first.
That is BPE with a merge for every way to cut a piece into two pieces, ranked by the piece's score.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers

SPACE = "\u2581"


def sentencepiece_backend(
    pieces: Sequence[str], scores: Sequence[float], *, unknown: int, add_prefix_space: bool
) -> Backend:
    """A backend for ``pieces`` (``<0xNN>`` pieces are bytes) with one log probability or rank score each."""
    vocab = {piece: i for i, piece in enumerate(pieces)}
    byte_fallback = "<0x00>" in vocab
    model = models.BPE(
        vocab=vocab,
        merges=_merges(vocab, scores),
        unk_token=pieces[unknown],
        fuse_unk=True,
        byte_fallback=byte_fallback,
    )
    backend = Backend(model)
    replace = normalizers.Replace(" ", SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), replace]) if add_prefix_space else replace
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if add_prefix_space:
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    return backend


def _merges(vocab: dict[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """All two-piece cuts of all pieces, best score first; ties by id, as SentencePiece numbers its pieces by rank."""
    ranked: list[tuple[float, int, int, int, str, str]] = []
    for piece, i in vocab.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocab and right in vocab:
                ranked.append((-scores[i], i, vocab[left], vocab[right], left, right))
    ranked.sort(key=lambda item: item[:4])
    return [(left, right) for *_, left, right in ranked]
