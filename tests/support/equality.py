"""What equality with transformers means (docs/architecture.md, "Exactness"): teacher-forced logits within 1e-4, of
large ones within as much more as they are larger, or within a few times what transformers' own fp32 is off its float64,
except behind a router that stood within 1e-5 of choosing otherwise; tokens equal up to such a point or a near-tie."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from engine_runs import Result

LOGIT_TOLERANCE = 1e-4  # of logits up to LARGE; of larger ones as much more as they are larger
LARGE = 32.0
"""From there on 1e-4 is fewer than fifty roundings in fp32, through a whole model: random weights in k-quants give
logits of 90 to 300."""
OWN_ERRORS = 4.0
"""Times transformers' own rounding error that ours may be: at logits of 150 it is up to 4e-4 off. oneDNN adds products
up one by one, MKL in several sums, in more of them on some processors than on others: ours is twice to nine times as
far off as transformers, which comes as near as 2e-5 at 300."""
ROUTER_GAP = 1e-5  # between the k-th and the next expert's router logit
TIE_GAP = 1e-4  # between the two largest logits


def assert_matches_transformers(reference: Any, prompts: Sequence[Sequence[int]], result: Result) -> None:
    """Compare every row's logits, given its own tokens, and its greedy choices, with ``reference`` in fp32."""
    assert result.errors == {}
    compared = 0
    for row, prompt in enumerate(prompts):
        tokens = result.tokens[row]
        exact: torch.Tensor | None = None
        with torch.no_grad():
            truth, gaps = _logits_and_gaps(reference, [*prompt, *tokens[:-1]])
        for step, token in enumerate(tokens):
            at = len(prompt) - 1 + step
            if gaps is not None and bool((gaps[: at + 1] < ROUTER_GAP).any()):
                break
            expected, got = truth[at], result.logits[row][step]
            difference = float((expected - got).abs().max())
            tolerance = LOGIT_TOLERANCE * max(1.0, float(expected.abs().max()) / LARGE)
            if difference > tolerance:
                exact = exact if exact is not None else _float64_logits(reference, [*prompt, *tokens[:-1]])
                tolerance = max(tolerance, OWN_ERRORS * float((expected.double() - exact[at]).abs().max()))
            assert difference <= tolerance, f"row {row}, token {step}: logits differ by {difference}"
            best = expected.topk(2).values
            if float(best[0] - best[1]) >= max(TIE_GAP, tolerance):
                assert token == int(expected.argmax()), f"row {row}, token {step}"
            compared += 1
    # By chance about one token and layer in 10,000 stands so close; contexts of 200 tokens meet that now and then.
    assert compared >= 0.75 * sum(len(tokens) for tokens in result.tokens), "too many rows stood at a router's edge"


def assert_same_bits(a: Result, b: Result) -> None:
    """Two runs of ours over the same prompts: the same tokens, from the same logits, bit for bit."""
    assert a.errors == b.errors == {}
    assert a.tokens == b.tokens
    assert a.logits.keys() == b.logits.keys()
    for row, logits in a.logits.items():
        assert torch.equal(logits, b.logits[row]), f"row {row}: {(logits - b.logits[row]).abs().max()}"


def _float64_logits(reference: Any, ids: Sequence[int]) -> torch.Tensor:
    """Logits [T, V] of the same model in float64."""
    wide = copy.deepcopy(reference).double()
    wide.config._experts_implementation = "eager"  # its grouped products know no float64
    with torch.no_grad():
        logits: torch.Tensor = wide(torch.tensor([list(ids)])).logits[0]
    return logits


def _logits_and_gaps(reference: Any, ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Logits [T, V]; smallest router gap of each token over all layers [T], or None without routers."""
    inputs = torch.tensor([list(ids)])
    top_k = getattr(reference.config, "num_experts_per_tok", None)
    if not top_k or not _reports_routers(reference):
        return reference(inputs).logits[0], None
    output = reference(inputs, output_router_logits=True)
    if output.router_logits[0].shape[-1] <= top_k:
        return output.logits[0], None  # every expert is chosen
    gaps = []
    for logits in output.router_logits:
        scores = logits.float().topk(top_k + 1, dim=-1).values
        gaps.append(scores[:, top_k - 1] - scores[:, top_k])
    return output.logits[0], torch.stack(gaps).amin(0)


def _reports_routers(reference: Any) -> bool:
    return hasattr(reference.config, "output_router_logits")
