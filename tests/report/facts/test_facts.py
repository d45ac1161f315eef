"""A bundle as facts: models of every kind, their parts, engines, files, and the command that made them."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import Any

import msgspec
import pytest
from frozen import frozen
from resealing import BASES, copied, reseal, without_engines
from txl_export.families.registry import facts_of_bundle
from txl_report.blocks import Code, Heading, Pairs, Table
from txl_report.facts.byte_shares import ByteShare, ByteShares
from txl_report.facts.engines import Engines
from txl_report.facts.gathering import Facts, gather
from txl_report.facts.model import Context, context_of, describe_bundle, family_of, memory_rows, steps_of
from txl_report.facts.plain import MOST_ROWS, Missing
from txl_report.facts.source import Source, command_of, source_of
from txl_report.schema.reading import MOST_TEXT
from txl_report.sections.making import files_section
from txl_report.sections.model import model_section
from txl_report.sections.speed import engines_section
from txl_runtime.bundle.encoding import file_sha256
from txl_runtime.bundle.engines.sidecar import Identity, Sidecar
from txl_runtime.bundle.manifest import Manifest
from txl_runtime.bundle.reading import open_bundle


def facts(path: Path, **more: Any) -> Facts:
    bundle = open_bundle(path)
    return gather(bundle, facts_of_bundle(bundle.manifest), **more)


def manifest_of(**fields: Any) -> Manifest:
    return msgspec.structs.replace(open_bundle(BASES / "transformer_xl").manifest, **fields)


# ---- what a model is


def test_a_transformer_xl_says_what_it_is():
    found = facts(BASES / "transformer_xl")
    manifest = open_bundle(BASES / "transformer_xl").manifest
    assert found.name == "transformer_xl"
    assert found.manifest == manifest
    assert [name for name, _ in found.described] == ["architecture", "positions", "dialect"]
    assert memory_rows(manifest) == manifest.memory_length
    assert isinstance(found.context, Context)
    assert found.context.tokens == manifest.reach
    config = manifest.config
    shown = f"{config.n_layer} × {manifest.memory_length} + {manifest.segment_lengths[0]}"
    assert found.context.formula.endswith(shown)
    assert {program.name for program in found.tables.programs} == {program.name for program in manifest.programs}
    shown = files_section(found).blocks[1]
    assert isinstance(shown, Table)
    assert [tuple(map(str, row)) for row in shown.rows] == [
        (name, f"{record.size:,}", str(Code(record.sha256))) for name, record in sorted(manifest.files.items())
    ]


@pytest.mark.parametrize(("name", "starts"), [("ring", "no rows"), ("zeros", "a tensor")])
def test_memory_begins_as_its_model_says(name: str, starts: str):
    assert {row.starts for row in facts(frozen(name)).tables.carries} == {starts}


def test_a_model_of_ones_own_without_tokens_says_what_it_has_not():
    found = facts(BASES / "step")
    assert isinstance(found.context, Missing)
    assert "replaces" in found.context.reason
    rows = dict(model_section(found).blocks[0].rows)
    assert (rows["Reads"], rows["Memory length M"]) == ("no token ids", "not counted in rows")
    assert [row.role for row in found.tables.reads] == ["feature", "valid"]
    assert [(row.name, row.update) for row in found.tables.carries] == [
        ("hidden", "replace"),
        ("count", "replace"),
    ]
    assert isinstance(found.repeated, Missing)
    assert found.repeated.command == "txl-deploy verify BUNDLE --json > verify.json"
    assert isinstance(found.speed, Missing)
    assert isinstance(found.engines, Missing)


def test_a_family_that_nobody_knows_has_its_tables(tmp_path: Path):
    path = reseal(copied(BASES / "step", tmp_path / "a.txl"), family={"name": "strange", "dialect": ["x"]})
    found = facts(path)
    assert (family_of(found.manifest), found.described) == ("strange", ())


@pytest.mark.parametrize(
    ("stepwise", "said"), [(None, "not known"), (1, "differ from single steps"), (2, "of up to 2 positions give what")]
)
def test_it_is_said_up_to_which_length_a_segment_is_as_many_steps(stepwise: int | None, said: str):
    manifest = manifest_of(stepwise=stepwise)
    assert said in steps_of(manifest)
    assert describe_bundle(manifest)["stepwise"] == stepwise


def earliest(layers: int, position: int, rows: int, longest: int, window: int | None) -> int:
    """The first token that a layer's row at a position depends on, walked down layer by layer."""
    for _ in range(layers):
        sees = position // longest * longest - rows
        position = sees if window is None else max(sees, position - window + 1)
    return position


@pytest.mark.parametrize("layers", [1, 2, 5])
@pytest.mark.parametrize("window", [None, 1, 2, "M", "M + 1", "single steps"])
def test_the_context_is_as_far_as_a_walk_through_the_layers_comes(layers: int, window: int | str | None):
    manifest = open_bundle(frozen("ring")).manifest
    rows, longest = manifest.memory_length, manifest.segment_lengths[0]
    few = longest if window == "single steps" else None
    width = {"M": rows, "M + 1": rows + 1, "single steps": rows + 1}.get(str(window), window)
    model = manifest.transformer_xl
    model = msgspec.structs.replace(
        model,
        config=msgspec.structs.replace(model.config, n_layer=layers),
        dialect=msgspec.structs.replace(model.dialect, window=None if few else width, single_steps=few),
    )
    changed = msgspec.structs.replace(manifest, family=msgspec.to_builtins(model), reach=model.reach(rows, longest))
    context = context_of(changed)
    assert isinstance(context, Context)
    begin = 1000 * longest
    assert context.tokens == max(
        position - earliest(layers, position, rows, longest, width) + 1 for position in range(begin, begin + longest)
    )


# ---- its parts


def test_parts_are_told_by_the_names_of_tensors_and_add_up():
    bundle = open_bundle(BASES / "transformer_xl")
    parts = facts(BASES / "transformer_xl").parts
    assert isinstance(parts, ByteShares)
    names = [part.name for part in parts.parts]
    assert names[:3] == ["embedding", "layers", "positions"]
    assert "other" not in names
    assert sum(part.bytes for part in parts.parts) == parts.bytes
    assert parts.bytes < bundle.manifest.files[bundle.manifest.weights].size


def test_of_an_adaptive_softmax_and_of_int8_the_parts_are_told_too():
    adaptive, small = facts(frozen("0.8/clusters")).parts, facts(frozen("int8")).parts
    assert isinstance(adaptive, ByteShares)
    assert isinstance(small, ByteShares)
    for parts in (adaptive, small):
        assert {"embedding", "layers", "positions", "softmax"} >= {part.name for part in parts.parts} > {"layers"}
        assert "other" not in {part.name for part in parts.parts}
        assert sum(part.bytes for part in parts.parts) == parts.bytes
    assert adaptive.note == small.note != "", "tied"


def test_parts_of_an_own_module_are_those_of_the_module(tmp_path: Path):
    parts = facts(BASES / "step").parts
    assert isinstance(parts, ByteShares)
    assert parts.bytes == sum(part.bytes for part in parts.parts)
    assert list(parts.parts) == sorted(parts.parts, key=lambda part: (-part.bytes, part.name))


def test_many_parts_are_taken_together():
    from txl_report.facts.byte_shares import parts_of
    from txl_runtime.bundle.weight_header import StoredTensor

    tensors = {f"m{index:02d}.weight": StoredTensor("F32", (1,), 0, 100 - index) for index in range(30)}
    parts = parts_of(tensors, open_bundle(BASES / "step").manifest)
    assert len(parts.parts) == 13
    assert parts.parts[0] == ByteShare("m00", 1, 100)
    assert parts.parts[-1].name == "18 more"
    assert parts.bytes == sum(100 - index for index in range(30))


def test_a_weight_file_that_cannot_be_read_is_a_reason(tmp_path: Path):
    path = copied(BASES / "transformer_xl", tmp_path / "a.txl")
    (path / "weights.safetensors").write_bytes(b"\xff" * 64)
    parts = facts(reseal(path)).parts
    assert isinstance(parts, Missing)
    assert parts.reason.startswith("The weight file cannot be read")


# ---- engines


def with_engine(path: Path, **changes: Any) -> Path:
    """A bundle with a file that a sidecar calls an engine."""
    program = open_bundle(path).manifest.programs[0]
    folder = path / "engines" / "rtx"
    folder.mkdir(parents=True)
    engine = folder / f"{program.name}.engine"
    engine.write_bytes(b"an engine")
    identity = Identity(
        flavour="tensorrt_rtx",
        version="1.7.0",
        compute_capabilities=(86, 89),
        device=None,
        platform="linux-x86_64",
        program=program.name,
        kind=program.kind,
        segment_length=program.segment_length or 1,
        update=program.update,
        precision="fp32",
        inputs=program.inputs,
        outputs=program.outputs,
        onnx="0" * 64,
        weights={},
    )
    known = {"seconds": 2.5, "kernels": 7, "layers": (("attention <b>", "myelin"),), "attention_layers": 2}
    more: dict[str, Any] = known | {"fused_attention": 1, "fused_kernels": {"_gemm_mha": 1}} | changes
    sidecar = Sidecar(key=identity.key, identity=identity, sha256=file_sha256(engine), bytes=9, **more)
    (folder / f"{program.name}.json").write_bytes(msgspec.json.encode(sidecar))
    return reseal(path)


def test_engines_tell_their_kernels_and_fusion(tmp_path: Path):
    found = facts(with_engine(without_engines(tmp_path / "a.txl"), verified_on=("selftest, GPU",)))
    assert isinstance(found.engines, Engines)
    every, heading, fused, layers = engines_section(found.name, found.engines).blocks
    assert isinstance(every, Table)
    (row,) = every.rows
    program = found.manifest.programs[0]
    assert row[:2] == (f"engines/rtx/{program.name}.engine", f"{program.name}, {program.update}, fp32")
    assert row[2:6] == ("9 B", "tensorrt_rtx 1.7.0, 2.50 s", "SM 86, 89", "7")
    assert row[6:] == ("1 of 2", "0 updated, 0 read, 0 copied", "selftest, GPU")
    assert (heading, fused) == (Heading(str(row[0])), Pairs([("Fused attention", "_gemm_mha")]))
    assert isinstance(layers, Table)
    assert layers.rows == (("attention <b>", "myelin"),)


def test_an_engine_whose_facts_are_damaged_is_a_problem_and_no_crash(tmp_path: Path):
    path = with_engine(without_engines(tmp_path / "a.txl"))
    (sidecar,) = (path / "engines" / "rtx").glob("*.json")
    sidecar.write_bytes(b"{" * 9)
    found = facts(reseal(path))
    assert isinstance(found.engines, Engines)
    assert found.engines.engines == ()
    assert "expected the facts of an engine" in found.engines.problems[0]


# ---- where it came from


def test_the_command_of_an_export_is_the_one_that_was_typed():
    """Every name stays one word for a shell."""
    command = {"arguments": ["a model.pt", "--text", "held out.txt"], "in_memory": []}
    line = command_of(manifest_of(provenance={"command": command}))
    assert shlex.split(line) == ["txl-deploy", "export", "a model.pt", "--text", "held out.txt"]
    assert command_of(manifest_of(provenance={"command": command | {"in_memory": ["source"]}})) == ""
    assert command_of(manifest_of(provenance={"command": ["model.pt"]})) == ""
    named = manifest_of(provenance={"command": command, "source": {"name": "a model.pt"}})
    found = files_section(dataclasses.replace(facts(BASES / "step"), command=line, source=source_of(named)))
    assert ("Exported by", Code(line)) in found.blocks[0].rows


# ---- bounds


def test_texts_and_tables_of_strangers_are_bounded(tmp_path: Path):
    path = copied(BASES / "step", tmp_path / "a.txl")
    long = "<b>" * 1_000
    provenance = {
        "source": {"name": long, "container": long, "sha256": long},
        "versions": {f"{index}{long}": long for index in range(500)},
        "command": {"arguments": [long] * 1_000, "in_memory": []},
    }
    found = facts(reseal(path, provenance=provenance, family={"name": long}))
    assert isinstance(found.source, Source)
    assert len(found.source.name) == MOST_TEXT
    assert len(found.source.sha256) == 64
    assert len(found.versions) == MOST_ROWS
    assert 0 < len(found.command) < 210 * MOST_TEXT
