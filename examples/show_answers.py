"""Print a few prompts with their answers: python examples/show_answers.py PROMPTS ANSWERS [COUNT]."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def shorten(text: str, limit: int) -> str:
    """On one line, cut in the middle of nowhere if need be."""
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def main() -> None:
    prompts, answers = (Path(name).read_text(encoding="utf-8").strip().split("\n") for name in sys.argv[1:3])
    count = int(sys.argv[3]) if len(sys.argv) > 3 else 6
    asked = {row["custom_id"]: row for row in map(json.loads, prompts)}
    for answer in [json.loads(line) for line in answers][:count]:
        question = asked[answer["custom_id"]]["messages"][-1]["content"]
        said = answer["text"] if answer["error"] is None else f"error: {answer['error']['message']}"
        print(f"  Q: {shorten(question, 110)}\n  A: {shorten(said, 110)}\n")


if __name__ == "__main__":
    main()
