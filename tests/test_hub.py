"""Hub names: cache first, only what is needed, nothing without consent; against a stand-in for the hub on loopback."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hub_stand_in import REVISION, Hub, running_hub

from batchgen_lite.errors import ModelError, UsageError
from batchgen_lite.hub import HubModel, choose_files, parse_hub_name
from batchgen_lite.model_path import resolve_model

# Contents differ: the cache keeps equal ones once.
_SMALL = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
CONFIGURATION = {name: f"content of {name}".encode() for name in _SMALL}
INDEX = json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}})
SHARDS = {
    "model.safetensors.index.json": INDEX.encode(),
    "model-00001-of-00002.safetensors": b"one" * 100,
    "model-00002-of-00002.safetensors": b"two" * 100,
}
# The same weights again, and what nobody needs to run a model.
BALLAST = {"consolidated.safetensors": b"x", "pytorch_model.bin": b"x", "original/params.json": b"x", "README.md": b"x"}


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running_hub() as hub:
        hub.files["org/sharded"] = CONFIGURATION | SHARDS | BALLAST
        hub.files["org/small"] = CONFIGURATION | {"model.safetensors": b"weights", "onnx/model.onnx": b"x"}
        hub.files["org/ggufs"] = {"config.json": b"{}", "tiny-Q4_K_M.gguf": b"four", "tiny-Q8_0.gguf": b"eight"} | {
            f"split/big-{part:05d}-of-00003.gguf": b"part" for part in (1, 2, 3)
        }
        yield hub


# A process of its own: conftest.py forbids the network to this one, and huggingface_hub reads its settings on import.
SCRIPT = """
import json, sys
from batchgen_lite.errors import BatchGenError
from batchgen_lite.model_path import resolve_model
calls = json.loads(sys.argv[1])
said = []
def confirm(text):
    said.append(text)
    return calls["answer"]
for call in calls["models"]:
    try:
        options = {"confirm": confirm, "note": said.append, **call}
        print(json.dumps(["path", str(resolve_model(**options))]))
    except BatchGenError as error:
        print(json.dumps([type(error).__name__, str(error)]))
print(json.dumps(["said", said]))
"""


def resolve(hub: Hub, home: Path, *models: str | dict[str, Any], answer: bool = False, **settings: str) -> list[Any]:
    """[what happened, path or message] for each model, and at the end what was said to the user."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    environment = {**kept, "HF_HOME": str(home), "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_PROGRESS_BARS": "1"} | settings
    calls = [model if isinstance(model, dict) else {"model": model} for model in models]
    command = [sys.executable, "-P", "-c", SCRIPT, json.dumps({"answer": answer, "models": calls})]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def names(path: str) -> set[str]:
    root = Path(path)
    return {str(file.relative_to(root)) for file in root.rglob("*") if file.is_file()}


def test_only_what_is_needed_is_fetched_and_then_the_cache_serves(hub: Hub, tmp_path: Path) -> None:
    (kind, path), (_, said) = resolve(hub, tmp_path, {"model": "org/sharded", "download": True})
    assert kind == "path"
    assert names(path) == set(CONFIGURATION | SHARDS)
    assert hub.fetched() == set(CONFIGURATION | SHARDS)
    assert len(said) == 1
    assert said[0].startswith("org/sharded: ")
    assert re.search(rf"\d+ B in 8 files to fetch, .* free in {re.escape(str(tmp_path))}", said[0])
    hub.requests.clear()
    again = resolve(
        hub, tmp_path, "org/sharded", f"org/sharded@{REVISION}", {"model": "org/sharded", "revision": "main"}
    )
    assert again == [["path", path]] * 3 + [["said", []]]
    assert hub.requests == []


def test_cached_models_need_neither_network_nor_a_writable_cache(hub: Hub, tmp_path: Path) -> None:
    (_, path), _ = resolve(hub, tmp_path, {"model": "org/small", "download": True})
    hub.requests.clear()
    folders = [tmp_path, *(entry for entry in tmp_path.rglob("*") if entry.is_dir() and not entry.is_symlink())]
    for folder in folders:
        folder.chmod(0o555)
    try:
        offline, missing, _ = resolve(hub, tmp_path, "org/small", "org/sharded", HF_HUB_OFFLINE="1")
    finally:
        for folder in folders:
            folder.chmod(0o755)
    assert offline == ["path", path]
    assert missing == [
        "ModelError",
        "org/sharded is not complete in the hub's cache, and HF_HUB_OFFLINE forbids fetching it",
    ]
    assert hub.requests == []


def test_nothing_is_fetched_without_consent(hub: Hub, tmp_path: Path) -> None:
    hub.sizes["model-00001-of-00002.safetensors"] = 3_000_000_000
    (kind, message), (_, said) = resolve(hub, tmp_path, "org/sharded", answer=False)
    assert kind == "ModelError"
    assert message.startswith("org/sharded: 2.79 GiB in 8 files to fetch")
    assert message.endswith("add --download to fetch it")
    assert len(said) == 1
    assert hub.fetched() == set()
    del hub.sizes["model-00001-of-00002.safetensors"]
    (kind, _), _ = resolve(hub, tmp_path, "org/sharded", answer=True)
    assert kind == "path"


def test_a_disk_that_is_too_small(hub: Hub, tmp_path: Path) -> None:
    hub.sizes["model.safetensors"] = 10**18
    (kind, message), (_, said) = resolve(hub, tmp_path, {"model": "org/small", "download": True})
    assert kind == "StorageError"
    assert message.startswith("org/small: 909495 TiB in 6 files to fetch, ")
    assert message.endswith("not enough; make room, or set HF_HUB_CACHE to a folder on another disk")
    assert said == []
    assert hub.fetched() == set()


def test_an_interrupted_download_goes_on(hub: Hub, tmp_path: Path) -> None:
    """A shard that is missing from the cache makes the model incomplete, and only that shard is fetched."""
    (_, path), _ = resolve(hub, tmp_path, {"model": "org/sharded", "download": True})
    (Path(path) / "model-00002-of-00002.safetensors").resolve().unlink()
    (Path(path) / "model-00002-of-00002.safetensors").unlink()
    hub.requests.clear()
    (kind, again), _ = resolve(hub, tmp_path, {"model": "org/sharded", "download": True})
    assert (kind, again) == ("path", path)
    assert hub.fetched() == {"model-00002-of-00002.safetensors"}


def test_gguf_files_by_name(hub: Hub, tmp_path: Path) -> None:
    one, split, unnamed, absent, _ = resolve(
        hub,
        tmp_path,
        "org/ggufs/tiny-Q4_K_M.gguf@v2",
        "org/ggufs/split/big-00002-of-00003.gguf",
        "org/ggufs",
        "org/ggufs/huge.gguf",
        answer=True,
    )
    assert Path(one[1]).read_bytes() == b"four"
    assert sorted(path.name for path in Path(split[1]).parent.iterdir()) == [
        f"big-{part:05d}-of-00003.gguf" for part in (1, 2, 3)
    ]
    assert unnamed[0] == "ModelError"
    assert unnamed[1].startswith("org/ggufs holds GGUF files; name one of them, as in ORG/NAME/FILE.gguf: split/big-")
    assert absent[1].startswith("org/ggufs has no file huge.gguf; name one of them")
    assert "tiny-Q8_0.gguf" not in hub.fetched()


def test_gated_absent_and_unreachable(hub: Hub, tmp_path: Path) -> None:
    hub.gated.add("org/small")
    gated, absent, revision, _ = resolve(hub, tmp_path, "org/small", "org/nothing", "org/sharded@v9", answer=True)
    assert gated == [
        "ModelError",
        f"org/small is gated: accept its terms at {hub.url}/org/small, then set HF_TOKEN to your token",
    ]
    assert absent[1].startswith(f"org/nothing is not on {hub.url}, or is private: check the name")
    assert revision[1].startswith("org/sharded has no revision 'v9'")
    allowed, _ = resolve(hub, tmp_path, "org/small", answer=True, HF_TOKEN="hf_right")
    assert allowed[0] == "path"
    unreachable, _ = resolve(hub, tmp_path, "org/sharded", HF_ENDPOINT="http://127.0.0.1:1")
    assert unreachable[0] == "ModelError"
    assert unreachable[1].startswith("cannot fetch org/sharded from http://127.0.0.1:1: ")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Qwen/Qwen3-30B-A3B", HubModel("Qwen/Qwen3-30B-A3B")),
        ("org/name@main", HubModel("org/name", None, "main")),
        ("org/name@refs/pr/3", HubModel("org/name", None, "refs/pr/3")),
        ("org/name/a b-Q4.gguf", HubModel("org/name", "a b-Q4.gguf")),
        ("org/name/sub/x.gguf@v1", HubModel("org/name", "sub/x.gguf", "v1")),
        ("org/name/model.bin", None),
        ("./org/name", None),
        ("/org/name", None),
        ("../name", None),
        ("org/../name/x.gguf", None),
        ("org/name@", None),
        ("name", None),
        ("http://host/org/name", None),
    ],
)
def test_names(name: str, expected: HubModel | None) -> None:
    assert parse_hub_name(name) == expected
    if expected is not None:
        assert str(expected) == name


def test_existing_paths_go_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve_model("org/name") == Path("org/name")
    with pytest.raises(ModelError, match=r"no such model: missing; give a directory, a .* or a hub id"):
        resolve_model("missing")
    with pytest.raises(UsageError, match="name two revisions"):
        resolve_model("org/other@v1", revision="v2")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["config.json", "pytorch_model.bin"], "neither model.safetensors nor model.safetensors.index.json"),
        (["model.safetensors"], "has no config.json"),
    ],
)
def test_repositories_that_cannot_run(files: list[str], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        choose_files(HubModel("org/name"), dict.fromkeys(files, 1))
