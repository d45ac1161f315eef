"""Graphs of this project's own bundles, whose tables say what is a state: every pair comes out as they have it."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
import pytest
from foreign_graphs import Here
from support import FIXTURES
from txl_export.families.graph.find.pairing import pair
from txl_export.families.graph.find.structure import read_structure
from txl_export.families.graph.find.trying import Inputs
from txl_export.families.graph.take.reading import read_foreign
from txl_runtime.bundle.reading import MANIFEST, open_bundle

BUNDLES = [path.parent for path in sorted((FIXTURES / "release_0_8").glob(f"*/{MANIFEST}"))]


@pytest.mark.parametrize("folder", BUNDLES, ids=lambda folder: folder.name)
def test_pairs_are_those_of_the_manifest(folder: Path, tmp_path: Path) -> None:
    bundle = open_bundle(folder)
    judged = 0
    for program in {program.file: program for program in bundle.manifest.programs}.values():
        shapes = {spec.name: spec.shape for spec in (*program.inputs, *program.outputs)}
        wanted = {
            state.input: state.output
            for state in bundle.manifest.states_of(program.update)
            if state.input in shapes and state.output in shapes
        }
        if any(shapes[given] != shapes[returned] for given, returned in wanted.items()) and folder.name == "stages":
            continue  # what one graph of stages returns is for the next graph
        foreign = read_foreign(bundle.file(program.file))
        runner = Here(bundle.file(program.file), tmp_path)
        inputs = Inputs(foreign, read_structure(ir.load(tmp_path / "folded.onnx").graph, foreign.inputs))
        inputs.find(runner)  # type: ignore[arg-type]
        found = pair(inputs, runner)  # type: ignore[arg-type]
        assert {state.input: state.output for state in found.states} == wanted, program.file
        judged += len(wanted)
    assert judged, "no state is among them"
