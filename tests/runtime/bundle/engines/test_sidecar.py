"""An engine's facts are read in the format that this version knows."""

from __future__ import annotations

import pytest
from frozen import frozen
from txl_runtime.bundle.engines.sidecar import decode_sidecar
from txl_runtime.errors import BundleError

FACTS = frozen("0.8/tokens") / "engines" / "cuda" / "logprobs-ring-1.json"


def test_facts_of_a_newer_format_are_refused_and_those_of_a_newer_minor_version_read():
    data = FACTS.read_bytes()
    assert decode_sidecar(data.replace(b'"1.0"', b'"1.7"'), "a.json").format_version == "1.7"
    with pytest.raises(BundleError, match=r"^a\.json: written in format 2\.0, this version reads 1\.0; upgrade"):
        decode_sidecar(data.replace(b'"1.0"', b'"2.0"'), "a.json")
