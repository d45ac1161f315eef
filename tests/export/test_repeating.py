"""The command that an export was asked for by: the same words give the same options, and no machine's paths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from txl_export.options import ExportOptions, flags_of_export
from txl_export.repeating import command_of
from txl_runtime.bundle.reading import open_bundle

from txl_deploy.verbs import command


def noted(source: object, **options: Any) -> tuple[list[str], list[str]]:
    found = command_of(source, ExportOptions(**options))
    return found["arguments"], found["in_memory"]


def test_nothing_asked_for_is_nothing_noted():
    assert noted("model.pt") == (["model.pt"], [])
    assert noted(Path("/home/somebody/models/model.pt"), force=True) == (["model.pt"], [])


def test_files_are_noted_without_their_folders(tmp_path: Path):
    folder = tmp_path / "a model"
    folder.mkdir()
    words, in_memory = noted(f"{folder}/", text=tmp_path / "held out.txt", config=str(tmp_path / "config.json"))
    assert words == ["a model", "--config", "config.json", "--text", "held out.txt"]
    assert not in_memory
    assert noted(str(tmp_path / "own.py") + ":build", weights=tmp_path / "w.pt")[0] == [
        "own.py:build",
        "--weights",
        "w.pt",
    ]


def test_names_that_look_like_options_are_files():
    assert noted("-odd.pt", text="--text")[0] == ["./-odd.pt", "--text", "./--text"]


def test_of_an_adapter_the_checkpoint_is_its_weights():
    assert noted("/models/mamba.pt", adapter="mamba")[0] == ["--weights", "mamba.pt", "--adapter", "mamba"]


def test_what_was_in_memory_is_named():
    words, in_memory = noted({}, config={"vocab_size": 60}, tokens=np.zeros(3, np.int32), memory_length=7)
    assert words == ["--memory-length", "7"]
    assert in_memory == ["source", "config", "tokens"]


@pytest.mark.parametrize(
    "options",
    [
        {"segment_length": [64, 1], "batch_size": (16, 4), "memory_length": 0, "clamp_length": 400},
        {"same_length": True, "verify": False, "precision": "int8", "keep": ["layers.00", "layers.01"]},
        {"same_length": False, "memory": "hidden", "boundary_token": 0, "embedding_scale": 1.5},
        {"aliases": {"mine.Model": "mem_transformer.MemTransformerLM"}, "family": "kimiyoung"},
        {"segment_length": np.int64(5), "initial_memory": "zeros", "cluster_order": "reversed", "growth": "stages"},
    ],
    ids=lambda options: ",".join(options),
)
def test_the_words_are_the_options_again(options: dict[str, Any]):
    """As the command line itself reads them."""
    words, _ = noted("model.pt", **options)
    export = command("export")
    context = export.make_context("export", words)
    read = {name: value for name, value in context.params.items() if name in flags_of_export()}
    read["aliases"] = dict(pair.split("=") for pair in read["aliases"] or []) or None
    given = {name: value for name, value in read.items() if value is not None and value != []}
    assert context.params["checkpoint"] == "model.pt"
    again, asked = ExportOptions(**given), ExportOptions(**options)
    assert (again.segment_lengths, again.batch_sizes) == (asked.segment_lengths, asked.batch_sizes)
    for name in set(options) - {"segment_length", "batch_size"}:
        assert getattr(again, name) == getattr(asked, name), name


def test_a_bundle_says_how_it_was_made(make_bundle):
    provenance = open_bundle(make_bundle(verify=False)).manifest.provenance
    assert provenance["command"] == {
        "arguments": ["--segment-length", "4", "--segment-length", "1", "--no-verify"],
        "in_memory": ["source", "config"],
    }
