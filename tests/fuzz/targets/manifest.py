"""Manifests: JSON as it is, or a good one after some changes of its parts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import msgspec
from txl_runtime.bundle.manifest import Manifest, decode_manifest

from fuzz.choices import Choices
from fuzz.edits import edited
from fuzz.targets.places import BASES, OLD


def one_input(data: bytes) -> None:
    """Decode a manifest; what is accepted has to hold together, and has to be accepted again when it is written."""
    choices = Choices(data)
    base = choices.pick((None, *_bases()))
    text = choices.rest() if base is None else json.dumps(edited(base, choices)).encode()
    manifest = decode_manifest(text, "manifest.json")
    assert decode_manifest(msgspec.json.encode(manifest), "manifest.json") == manifest
    _use(manifest)


def seeds() -> Iterator[bytes]:
    """Good manifests, each with some changes."""
    for number, base in enumerate(_bases(), 1):
        yield bytes([number])
        if number < 3:
            yield b"\0" + json.dumps(base).encode()
        for kind in range(8):
            yield bytes([number, 2, 7, 0, kind, kind, 3, 9, 0, kind, 1])
    yield b"\0" + b'{"format":"txl-deploy.bundle","format_version":"3.0"}'
    yield b"\0" + b"[" * 64


def _use(manifest: Manifest) -> None:
    """Ask of a manifest all that a runtime asks before it opens anything; none of it may fail, or go outside."""
    for name in (manifest.weights, *(program.file for program in manifest.programs), *manifest.files):
        assert not name.startswith("/"), name
        assert ".." not in name.split("/"), name
    for name in (manifest.weights, *(program.file for program in manifest.programs)):
        assert name in manifest.files, name
    assert manifest.updates, manifest.updates
    for update in manifest.updates:
        states = manifest.states_of(update)
        assert len({state.name for state in states}) == len(states)
    assert manifest.state_bytes >= 0
    assert manifest.segment_lengths == tuple(sorted(set(manifest.segment_lengths), reverse=True))
    assert manifest.memory_length >= 0
    assert manifest.vocab_size >= 0
    assert manifest.softmax_products >= 0
    assert isinstance(manifest.family_name, str)
    if manifest.logprobs is not None:
        assert manifest.logprobs.role == "logprobs"
    if manifest.family_name == "transformer_xl":
        assert manifest.transformer_xl.config.n_layer > 0


@cache
def _bases() -> tuple[Any, ...]:
    found = [json.loads((BASES / name / "manifest.json").read_text("utf-8")) for name in ("step", "transformer_xl")]
    return (*found, json.loads((OLD / "growing" / "manifest.json").read_text("utf-8")))
