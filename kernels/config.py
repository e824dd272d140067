"""Block sizes of the kernels: a pure look-up in a checked-in table, never a measurement at run time.

The key is (capability, op, dtype or weight encoding, N, K, page): what a row's arithmetic may depend on. The number of
tokens, of sequences and of multiprocessors is deliberately no part of it: two runs that batch a row differently must
add its products in the same order, or the row's bits would depend on its neighbours. Run-time autotuning is ruled out
for the same reason, and because its trial launches would break a memory budget.

``config.json`` holds, per op, an ordered list of rules; the first whose conditions all hold is used. A condition is a
list of allowed values ("capability", "dtype", "compute") or an inclusive upper limit ("max_n", "max_k").
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchgen_lite.errors import UnsupportedError

TABLE = Path(__file__).with_name("config.json")


@dataclass(frozen=True, slots=True)
class Config:
    """Sizes of one kernel instance. Blocks that an op does not use are 0.

    ``block_m`` rows (tokens, or query rows), ``block_n`` output columns, ``block_k`` steps of the reduction (for
    attention: positions of a page at a time), ``split`` pages that one attention program covers.
    """

    num_warps: int
    num_stages: int
    block_m: int = 0
    block_n: int = 0
    block_k: int = 0
    split: int = 0


def lookup(op: str, *, capability: str, dtype: str, compute: str = "", n: int = 0, k: int = 0) -> Config:
    """The configuration of ``op``. The same key always gives the same answer. Raises UnsupportedError if none fits.

    ``dtype``: the operand's type or the weights' encoding; ``compute``: the activations' type where both matter.
    """
    number = find_rule(op, capability=capability, dtype=dtype, compute=compute, n=n, k=k)
    if number is None:
        raise UnsupportedError(
            f"no kernel configuration for {op} with dtype {dtype}, N={n}, K={k} on capability {capability}; "
            "the torch path serves it, or add a rule to kernels/config.json"
        )
    return _config(op, number)


def find_rule(op: str, *, capability: str, dtype: str, compute: str, n: int, k: int) -> int | None:
    """The number of the first rule of ``op`` that fits, None if none does."""
    return _find(op, capability, dtype, compute, n, k)


@functools.cache
def _config(op: str, number: int) -> Config:
    return Config(**_table()[op][number]["use"])


@functools.cache
def _find(op: str, capability: str, dtype: str, compute: str, n: int, k: int) -> int | None:
    """Remembered, as every launch asks: there are as many answers as a model has kinds of matrices."""
    for number, rule in enumerate(_table()[op]):
        if _matches(rule.get("when", {}), capability, dtype, compute, n, k):
            return number
    return None


def all_rules() -> Mapping[str, list[dict[str, Any]]]:
    """The table as parsed, for the tests that compile every rule."""
    return _table()


def _matches(when: Mapping[str, Any], capability: str, dtype: str, compute: str, n: int, k: int) -> bool:
    return (
        ("capability" not in when or capability in when["capability"])
        and ("dtype" not in when or dtype in when["dtype"])
        and ("compute" not in when or compute in when["compute"])
        and n <= when.get("max_n", n)
        and k <= when.get("max_k", k)
    )


@functools.cache
def _table() -> dict[str, list[dict[str, Any]]]:
    table: dict[str, list[dict[str, Any]]] = json.loads(TABLE.read_text(encoding="utf-8"))
    return table
