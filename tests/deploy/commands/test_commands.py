"""Every verb from checkpoint to score, as a user types it: exit codes, what stands on stdout and what on stderr."""

import json
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import txl_runtime
from drafting import windowed
from frozen import frozen
from resealing import copied, reseal
from safetensors.numpy import load_file, save_file
from support import ORACLE, cli, random_state, save_checkpoint, small_config
from txl_export.families.transformer_xl.paper_model import PaperModel
from txl_report.calibration import record
from txl_report.facts.model import steps_of
from txl_report.numbers import prefixed
from txl_runtime.bundle.reading import SELFTEST, open_bundle
from txl_runtime.bundle.transformer_xl import Dialect, ModelConfig

TEXT = "The memory of a segment is the input of the next one. " * 8
CONFIG = small_config(vocab_size=256)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("commands")
    save_checkpoint(path / "model.pt", CONFIG, vocabulary={"kind": "bytes"})
    (path / "text.txt").write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def exported(folder: Path) -> subprocess.CompletedProcess[str]:
    return cli("export", "model.pt", cwd=folder)


@pytest.fixture
def bundle(folder: Path, exported: subprocess.CompletedProcess[str]) -> Path:
    assert exported.returncode == 0, exported.stderr
    return folder / "model.txl"


@pytest.fixture
def ids_only() -> Path:
    """A bundle without a vocabulary."""
    return frozen("0.8/clusters")


# ---- export


def test_export_of_a_checkpoint_alone_makes_a_bundle_beside_it(folder, exported):
    assert exported.returncode == 0
    manifest = open_bundle(folder / "model.txl").manifest
    assert manifest.segment_lengths == (64, 1)
    assert (manifest.batch_size, manifest.memory_length, manifest.precision) == (1, 7, "fp32")
    assert manifest.transformer_xl.memory == "kv"
    assert sorted(path.name for path in folder.iterdir()) == ["model.pt", "model.txl", "text.txt"]
    lines = exported.stdout.splitlines()
    assert lines[-1].startswith("model.txl: ")
    assert lines[-1].endswith(", verified")
    page = (folder / "model.txl" / "report.html").read_text()
    size = sum(file.size for name, file in manifest.files.items() if name != "report.html")
    assert f"model.txl: {prefixed(size)}, verified" == lines[-1]
    assert f">{prefixed(size)}<" in page.replace("\u00a0", " ")
    assert f"model.txl, {prefixed(size)}, every" in cli("inspect", "model.txl", cwd=folder).stdout
    assert [line.split()[-1] for line in lines if line.startswith(("log-probs max abs", "memory max abs"))] == [
        "passed",
        "passed",
    ]
    told = exported.stderr.splitlines()
    assert told[0] == "note: recognised as txl: format txl-deploy.checkpoint"
    assert told[1].startswith("note: ")
    assert "--memory-length 7 --clamp-length 0 --no-same-length" in told[1]
    stages = [line.partition(":")[0] for line in told[2:]]
    assert stages == [
        "read the checkpoint",
        "trace and check logprobs-1",
        "trace and check logprobs-64",
        "trace and check head",
        "trace and check hidden-ring",
        "compute self-test vectors",
        "load the bundle",
        "verify against PyTorch, ring memory",
        "compare bits of sequences and snapshots",
        "load the bundle",
        "verify against PyTorch, rolled memory",
        "write the page",
        "self-test",
    ]


@pytest.mark.slow
def test_every_option_of_export_reaches_the_bundle(run, folder, tmp_path):
    sizes = ["--segment-length", 3, "--segment-length", 2, "--memory-length", 5, "--clamp-length", 4, "--same-length"]
    more = ["--batch-size", 2, "--memory", "hidden", "--family", "txl", "--no-verify", "--json"]
    options = [*sizes, *more]
    result = run("export", folder / "model.pt", "-o", tmp_path / "other.txl", *options)
    assert result.code == 0
    manifest = open_bundle(tmp_path / "other.txl").manifest
    assert manifest.segment_lengths == (3, 2)
    assert (manifest.batch_size, manifest.memory_length, manifest.transformer_xl.memory) == (2, 5, "hidden")
    assert (manifest.dialect.window, manifest.dialect.clamp_length) == (5, 4)
    files = [path for path in (tmp_path / "other.txl").iterdir() if path.name not in ("manifest.json", "report.html")]
    assert result.document == {
        "bundle": str(tmp_path / "other.txl"),
        "bytes": sum(path.stat().st_size for path in files),
        "model_id": manifest.model_id,
        "parity": None,
    }
    assert "not given" not in result.stderr  # nothing was taken from the file
    shown = run("inspect", tmp_path / "other.txl")
    assert "NOT verified" in shown.stdout


# ---- inspect


def test_inspect_of_a_bundle(run, bundle):
    manifest = open_bundle(bundle).manifest
    shown = run("inspect", bundle)
    assert shown.code == 0
    assert shown.stderr == ""
    for expected in (
        manifest.model_id[:12],
        "2 layers, d_model 16, 2 heads of 8, d_inner 32, 256 tokens",
        "B 1, L 64, 1, M 7",
        "1.8 kB per sequence",  # 2 layers x (keys + values) x 7 rows x 16 x 4 bytes
        f"segments           {steps_of(manifest)}",
        "135 tokens",  # 7 rows and the segment, and one layer more: of that, rows that have seen a whole segment
        "model.pt (torch zip)",
        "vocabulary.json",
        "logprobs-64.onnx",
        "hidden-ring.onnx",
        "head.onnx",
    ):
        assert expected in shown.stdout
    document = run("inspect", bundle, "--json").document
    assert document["kind"] == "bundle"
    assert document["bytes_per_stream"] == 2 * 2 * 7 * 16 * 4
    assert document["effective_context"] == 64 + 7 + 64
    assert document["stepwise"] == manifest.stepwise
    assert document["manifest"] == json.loads((bundle / "manifest.json").read_bytes())


def test_inspect_of_a_checkpoint(run, folder):
    shown = run("inspect", folder / "model.pt")
    assert shown.code == 0
    assert "torch zip" in shown.stdout
    assert "embedding.tables.0" in shown.stdout
    document = run("inspect", folder / "model.pt", "--json").document
    assert (document["kind"], document["family"], document["container"]) == ("checkpoint", "txl", "torch zip")
    state = random_state(CONFIG)
    assert document["parameters"] == sum(tensor.numel() for tensor in state.values())
    shapes = {entry["name"].removeprefix("state."): tuple(entry["shape"]) for entry in document["tensors"]}
    assert shapes == {name: tuple(tensor.shape) for name, tensor in state.items()}
    assert document["evaluation"]["memory_length"] == 7


def test_inspect_tells_a_bare_state_dict_what_it_needs(run, tmp_path):
    """The state dict of this code base says neither its sizes nor where the layer norms are."""
    values = dict(np.load(ORACLE / "kimiyoung" / "k02_pre_lnorm.npz"))
    state = {name[3:]: torch.from_numpy(values[name]) for name in values if name.startswith("sd/")}
    torch.save(state, tmp_path / "bare.pt")
    constructor = json.loads((ORACLE / "kimiyoung" / "k02_pre_lnorm.json").read_text())["ctor"]
    document = run("inspect", tmp_path / "bare.pt", "--json").document
    assert document["family"] == "kimiyoung"
    assert document["recognised"] == (
        "kimiyoung: tensors named word_emb.emb_layers.0.weight and crit.out_layers.0.bias"
    )
    assert "n_token, n_layer, n_head, d_model, d_head, d_inner, pre_lnorm" in document["needed"]
    (tmp_path / "args.json").write_text(json.dumps({k: v for k, v in constructor.items() if k != "pre_lnorm"}))
    document = run("inspect", tmp_path / "bare.pt", "--config", tmp_path / "args.json", "--json").document
    assert document["needed"].endswith(
        "does not say its pre_lnorm, expected it of the code that trained it; "
        'give --config FILE.json, which holds e.g. {"pre_lnorm":false}'
    )
    (tmp_path / "args.json").write_text(json.dumps(constructor))
    document = run("inspect", tmp_path / "bare.pt", "--config", tmp_path / "args.json", "--json").document
    assert "needed" not in document
    assert document["config"]["pre_lnorm"] is True
    assert document["dialect"] == {"initial_memory": "empty", "cluster_order": "reversed"}


# ---- verify and selftest


def test_verify_judges_text_where_there_is_some(run, folder, bundle):
    result = run("verify", bundle, "--checkpoint", folder / "model.pt", "--text", folder / "text.txt", "--json")
    assert result.code == 0
    assert result.document["passed"] is True
    assert {gate["verdict"] for gate in result.document["gates"]} == {"passed"}
    assert result.document["text"]["tokens"] == len(TEXT)
    assert result.document["reference"] == "the checkpoint, computed in float64"
    assert "not repeated" not in result.stderr

    shown = run("verify", bundle, "--segments", 3)
    assert shown.code == 0
    assert [line.split()[0] for line in shown.stdout.splitlines() if line.rstrip().endswith("not judged")] == [
        "perplexity",
        "vocabulary",
    ]
    assert "segments of 64" in shown.stdout
    assert "against the bundle's own weights" in shown.stdout
    assert "not repeated" in shown.stderr


def test_selftest_replays_the_vectors(run, bundle):
    shown = run("selftest", bundle)
    assert shown.code == 0
    assert "passed" in shown.stdout
    assert [line.split() for line in shown.stdout.splitlines() if "not " in line][:-1] == [
        ["not", "built", "rtx,", "tensorrt,", "cuda,", "native;", "--json", "says", "why"]
    ]
    result = run("selftest", bundle, "--json", "--threads", 1, "--backend", "cpu")
    assert result.code == 0
    assert result.document["passed"] is True
    assert 0 < result.document["max_logprobs"] <= result.document["limit_logprobs"]
    assert result.document["streams"] == [1]


def test_a_selftest_that_fails_ends_with_exit_code_1(run, tmp_path):
    path = copied(frozen("ring"), tmp_path / "a.txl")
    vectors = load_file(path / SELFTEST)
    vectors["logprobs"] += 1
    save_file(vectors, path / SELFTEST)
    reseal(path)
    shown, result = run("selftest", path), run("selftest", path, "--json")
    assert "FAILED" in shown.stdout
    assert (shown.code, result.code, result.document["passed"]) == (1, 1, False)


# ---- generate


def test_generate_prints_exactly_the_text(run, bundle):
    options = ("--prompt", "The memory", "--max-new-tokens", 40, "--seed", 3)
    first, again = (run("generate", bundle, *options) for _ in range(2))
    other = run("generate", bundle, *options[:-1], 4)
    stream = txl_runtime.load(bundle).stream(1)
    drawn = bytes(int(token[0]) for token in stream.generate(np.frombuffer(b"The memory", np.uint8), 40, seed=3))
    assert first.code == 0
    assert first.stdout == again.stdout == drawn.decode(errors="replace") + "\n"
    assert other.stdout != first.stdout
    (line,) = first.stderr.splitlines()
    assert line.startswith("40 tokens in ")


def test_generate_options_reach_the_sampler(run, bundle):
    def tokens(*options: object) -> list[int]:
        result = run("generate", bundle, "--prompt", "a", "--max-new-tokens", 12, "--json", *options)
        assert result.code == 0
        assert result.document["text"] == bytes(result.document["tokens"]).decode(errors="replace")
        return result.document["tokens"]

    greedy = tokens("--temperature", 0)
    assert len(greedy) == 12
    assert tokens("--top-k", 1) == tokens("--top-p", 1e-6) == tokens("--temperature", 1e-6) == greedy
    stopped = tokens("--temperature", 0, "--stop-tokens", f"{greedy[4]},{greedy[5]}")
    assert stopped == greedy[: min(greedy.index(greedy[4]), greedy.index(greedy[5])) + 1]
    assert not {*greedy} & {*tokens("--temperature", 0, "--forbid", ",".join(map(str, greedy)))}
    assert {*tokens("--temperature", 99, "--seed", 1, "--allow", "65,66,67", "--forbid", "66")} == {65, 67}


def test_generate_without_a_vocabulary_speaks_token_ids(run, ids_only):
    options = ("--prompt-tokens", "1,2,3", "--max-new-tokens", 5, "--seed", 0)
    shown, document = run("generate", ids_only, *options), run("generate", ids_only, *options, "--json").document
    assert [int(token) for token in shown.stdout.split()] == document["tokens"]
    assert document["text"] is None
    nothing = run("generate", ids_only, "--prompt-tokens", "1", "--max-new-tokens", 0)
    assert (nothing.code, nothing.stdout, nothing.stderr) == (0, "\n", "")


def test_generate_says_how_many_drafted_tokens_came_true(run, make_bundle, tmp_path):
    window = windowed(make_bundle, tmp_path / "small.txl", vocabulary=True, config={"vocab_size": 256})
    options = ("--prompt", "abcabcabc", "--max-new-tokens", 60, "--allow", "97")
    plain, drafted = run("generate", window, *options), run("generate", window, *options, "--lookup", 4)
    assert plain.stdout == drafted.stdout == 60 * "a" + "\n"
    (line,) = drafted.stderr.splitlines()
    found = re.fullmatch(r"60 tokens in .* per second; (\d+) of (\d+) drafted tokens came true", line)
    assert found is not None
    kept, tried = map(int, found.groups())
    assert 0 < kept <= tried
    assert "drafted" not in plain.stderr
    refused = run("generate", window, *options, "--lookup", 9)
    assert (refused.code, "lookup is 9, expected a whole number of 0 … 4" in refused.stderr) == (2, True)


# ---- score


def nll_of_the_reference(ids: np.ndarray, config: dict[str, Any]) -> float:
    """Mean nll, nats per token, in float64, with segments of 64."""
    fields = {name: value for name, value in config.items() if name in ModelConfig.__struct_fields__}
    model, memory_length = ModelConfig(**fields), config["memory_length"]
    reference = PaperModel(model, Dialect(), memory_length, random_state(config), torch.float64)
    memory, total = reference.initial_memory(), 0.0
    for first in range(0, len(ids) - 1, 64):
        piece = torch.from_numpy(ids[first : first + 65].astype(np.int64))[None]
        logprobs, memory = reference(piece[:, :-1], memory)
        total -= float(logprobs.gather(2, piece[:, 1:, None]).sum())
    return total / (len(ids) - 1)


@pytest.mark.parametrize("repeats", [1, 5], ids=["in one call", "in several"])
def test_score_is_what_the_reference_computes(run, bundle, tmp_path, repeats):
    data = (TEXT * repeats).encode()
    (tmp_path / "text.txt").write_bytes(data)
    assert (len(data) > 64 * 16) == (repeats == 5)
    result = run("score", bundle, tmp_path / "text.txt", "--json")
    assert result.code == 0
    expected = nll_of_the_reference(np.frombuffer(data, np.uint8), CONFIG)
    document = result.document
    assert (document["tokens"], document["scored_tokens"]) == (len(data), len(data) - 1)
    assert document["nll"] == pytest.approx(expected, abs=1e-5)
    assert document["bits_per_byte"] == pytest.approx(expected / math.log(2), abs=1e-5)
    assert document["bits_per_token"] == pytest.approx(document["bits_per_byte"])  # a byte is a token
    assert document["perplexity"] == pytest.approx(math.exp(expected), rel=1e-4)


def test_score_ends_with_one_line_on_the_whole_text(run, ids_only, tmp_path):
    bundle = frozen("clusters")
    (tmp_path / "text.txt").write_text("ab" * 700)
    *_, last = run("score", bundle, tmp_path / "text.txt").stdout.splitlines()
    assert re.fullmatch(r"1,399 of 1,400 tokens scored: perplexity \d+\.\d{6}, \d+\.\d{6} bits per byte", last)
    np.save(tmp_path / "ids.npy", np.zeros(5, np.int32))
    *_, last = run("score", ids_only, tmp_path / "ids.npy").stdout.splitlines()
    assert re.fullmatch(r"4 of 5 tokens scored: perplexity \d+\.\d{6}", last)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "empty.txt").write_text("")
    assert run("score", bundle, tmp_path / "texts").stdout.splitlines()[-1] == "0 of 0 tokens scored"


@pytest.mark.parametrize(("others", "notes"), [(b"", 1), (b" and more", 1), (None, 0)], ids=["all", "more", "other"])
def test_score_of_the_text_that_int4_is_fitted_to_says_so(run, bundle, tmp_path, others, notes):
    noted = open_bundle(bundle).manifest.provenance | {"calibration": record(np.frombuffer(TEXT.encode(), np.uint8))}
    fitted = reseal(copied(bundle, tmp_path / "fitted.txl"), precision="int4", provenance=noted)
    (tmp_path / "text.txt").write_bytes(b"other" if others is None else TEXT.encode() + others)
    result = run("score", fitted, tmp_path / "text.txt", "--json")
    said = f"note: int4 is fitted to the text's first {len(TEXT)} tokens; the figures flatter the bundle"
    assert (result.code, result.stderr.count(said)) == (0, notes)
    assert result.stderr.count("int4") == notes


def test_score_of_nan_is_no_result(run, bundle, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "txl_runtime.streaming.stream.Stream.score", lambda self, ids: np.full((1, ids.shape[1] - 1), np.nan)
    )
    (tmp_path / "text.txt").write_text(TEXT)
    result = run("score", bundle, tmp_path / "text.txt", "--json")
    assert result.code == 2
    assert "hold NaN, expected numbers" in result.document["error"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("--segments", 3), "--segments is given with --bisect"),
        (("--threads", 1), "--threads is given with --bisect"),
        (("--backend", "cuda"), "'cuda', which cannot be taken apart"),
        (("--backend", "nonsense"), "'nonsense', which cannot be taken apart"),
    ],
)
def test_bisect_takes_no_option_that_it_would_not_heed(run, bundle, given, words):
    result = run("verify", bundle, "--bisect", *given)
    assert result.code == 2
    assert words in result.stderr


def test_score_of_token_ids_has_no_bytes(run, bundle, folder, tmp_path):
    np.save(tmp_path / "ids.npy", np.frombuffer(TEXT.encode(), np.uint8))
    by_ids, by_text = (run("score", bundle, file, "--json") for file in (tmp_path / "ids.npy", folder / "text.txt"))
    assert by_ids.document == by_text.document | {"bits_per_byte": None}
    shown = run("score", bundle, tmp_path / "ids.npy")
    assert f"{by_ids.document['perplexity']:.6f}" in shown.stdout
    assert "bits per byte" not in shown.stdout


# ---- stdout and exit codes


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("inspect", "nothing-here"), 2),
        (("export", "nothing-here.pt"), 2),
        (("export", "--segment-length", "many", "model.pt"), 2),
        (("verify", "nothing-here"), 2),
        (("selftest", "nothing-here"), 2),
        (("generate", "model.txl"), 2),
        (("score", "model.txl", "nothing-here"), 2),
        (("verify", "model.txl", "--checkpoint", "other.pt"), 1),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else None,
)
def test_json_is_one_document_also_when_it_fails(run, bundle, folder, monkeypatch, arguments, code):
    monkeypatch.chdir(folder)
    if "other.pt" in arguments:
        save_checkpoint(folder / "other.pt", CONFIG, random_state(CONFIG, seed=1))
    result = run(*arguments, "--json")
    assert result.code == code
    assert result.document["exit_code"] == code
    assert result.stderr.splitlines()[-1] == f"error: {result.document['error']}"


def test_a_command_that_does_not_exist_is_wrong_use(run):
    result = run("frobnicate")
    assert result.code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: No such command 'frobnicate'")


def generating(bundle: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "txl_deploy", "generate", str(bundle), "--prompt", "a"]
    endless = ["--max-new-tokens", "9999999"]
    return subprocess.Popen([*command, *endless], stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.skipif(sys.platform == "win32", reason="signals are Unix's")
@pytest.mark.parametrize(("number", "told"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "terminated")])
def test_a_command_that_is_stopped_says_so(bundle, number, told):
    process = generating(bundle)
    assert process.stdout is not None
    assert process.stdout.read(20)  # it is at work
    process.send_signal(number)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert stderr.decode() == f"error: {told}\n"


@pytest.mark.skipif(sys.platform == "win32", reason="pipes are Unix's")
def test_a_reader_that_goes_away_ends_the_command_quietly(bundle):
    process = generating(bundle)
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.read(20)
    process.stdout.close()
    assert process.wait(60) == 141, "as a shell counts it"
    assert process.stderr.read() == b""
    process.stderr.close()


def test_the_command_is_installed_under_its_name():
    script = Path(sys.executable).with_name("txl-deploy" + (".exe" if os.name == "nt" else ""))
    done = subprocess.run([script, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == cli("--version").stdout.strip()
    assert done.stderr == ""
