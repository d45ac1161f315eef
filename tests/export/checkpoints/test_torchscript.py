"""TorchScript archives: their tensors by the names that torch.jit.load gives them, and nothing of their code."""

from __future__ import annotations

import io
import resource
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pickle_programs import call, code, name, program, tensor, watching, zip_bytes
from support import PACKAGES, random_state, small_config
from torch import Tensor, nn
from txl_export.checkpoints import load, read_checkpoint
from txl_export.checkpoints.imported import ScriptedError
from txl_export.checkpoints.plain_weights import read_stored, read_weights
from txl_runtime.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated:DeprecationWarning")


class Policy(nn.Module):
    """An LSTM whose state is kept in buffers, as policies for robots have it."""

    def __init__(self, inputs: int = 5, hidden: int = 8) -> None:
        super().__init__()
        self.memory = nn.LSTM(inputs, hidden)
        self.actor = nn.Sequential(nn.Linear(hidden, 4), nn.ELU(), nn.Linear(4, 3))
        self.register_buffer("hidden_state", torch.ones(1, 1, hidden))
        self.register_buffer("cell_state", torch.zeros(1, 1, hidden), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        out, (h, c) = self.memory(x.unsqueeze(0), (self.hidden_state, self.cell_state))
        self.hidden_state[:] = h
        self.cell_state[:] = c
        return self.actor(out.squeeze(0))


class Odd(nn.Module):
    """Tensors wherever a module may have them: tied, views, of other types, in attributes and in lists."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        rows = torch.arange(12.0).reshape(3, 4)
        self.register_buffer("columns", rows.T)
        self.register_buffer("short", torch.ones(2, dtype=torch.float16))
        self.register_buffer("brain", torch.ones(2, dtype=torch.bfloat16))
        self.register_buffer("whole", torch.tensor([1 << 40]))
        self.cache = rows[1:, 2]
        self.caches = [torch.ones(1), torch.zeros(2)]
        self.named = {"left": torch.ones(3)}
        self.pair = (torch.ones(2), 1)
        self.numbers, self.device, self.word = [1.5, 2.5], torch.device("cpu"), "x"

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x)) + self.cache[0] + self.caches[0][0] + self.named["left"][0] + self.pair[0][0]
        return x + self.columns[0, 0] + self.short[0] + self.brain[0] + self.whole[0] + self.numbers[0]


def saved(module: nn.Module, path: Path, *inputs: Tensor) -> Path:
    """An archive of a module: traced on the inputs, or scripted."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.trace(module, inputs) if inputs else torch.jit.script(module)
        torch.jit.save(scripted, path)
    return path


def same(found: dict[str, Any], expected: dict[str, Tensor]) -> bool:
    return list(found) == list(expected) and all(
        found[key].dtype == value.dtype and found[key].stride() == value.stride() and torch.equal(found[key], value)
        for key, value in expected.items()
    )


@pytest.mark.parametrize("traced", [False, True])
def test_tensors_have_the_names_and_values_of_torchs_own_reader(tmp_path: Path, traced: bool) -> None:
    path = saved(Policy(), tmp_path / "policy.pt", *([torch.zeros(1, 5)] if traced else []))
    expected = torch.jit.load(path).state_dict()
    assert {"hidden_state", "cell_state", "memory.weight_ih_l0", "actor.2.bias"} <= expected.keys()
    with watching():
        found = read_weights(path)
    assert same(found, expected)
    assert same(read_stored(path), expected)


def test_views_ties_other_types_and_tensors_in_attributes_are_read(tmp_path: Path) -> None:
    path = saved(Odd(), tmp_path / "odd.pt")
    found, loaded = read_weights(path), torch.jit.load(path)
    expected = loaded.state_dict()
    assert same({key: found[key] for key in expected}, expected)
    assert found["columns"].stride() == (1, 4)
    assert found["first.weight"] is found["second.weight"]
    assert found["cache"].untyped_storage().data_ptr() == found["columns"].untyped_storage().data_ptr()
    others = {"cache": loaded.cache, "caches.0": loaded.caches[0], "caches.1": loaded.caches[1]}
    others |= {"named.left": loaded.named["left"], "pair.0": loaded.pair[0]}
    assert same({key: value for key, value in found.items() if key not in expected}, others)


def test_the_class_of_each_part_is_told_as_python_knew_it(tmp_path: Path) -> None:
    loaded = load(saved(Policy(), tmp_path / "policy.pt"))[1]
    assert loaded.container == "TorchScript"
    assert loaded.classes[""].endswith("test_torchscript.Policy")
    assert loaded.classes["memory"] == "torch.nn.modules.rnn.LSTM"
    assert {loaded.classes[f"actor.{n}"] for n in (0, 2)} == {"torch.nn.modules.linear.Linear"}


def test_what_a_module_keeps_in_no_other_way_than_quantised_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "quantised.pt"

    class Quantised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("w", torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.w.dequantize()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = Quantised()
    with pytest.raises(CheckpointError, match="quantised and complex tensors are not read here"):
        read_weights(saved(module, path))


def test_a_frozen_archive_whose_tensors_have_no_names_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "frozen.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.freeze(torch.jit.script(nn.Linear(3, 2).eval())), path)
    with pytest.raises(CheckpointError, match=r"its 2 tensors are constants of its code, .* before it is frozen"):
        read_weights(path)


def archive(*entries: tuple[str, Any], body: object = None) -> bytes:
    module = call("__torch__.P") if body is None else body
    return zip_bytes([("a/data.pkl", program(module)), ("a/data/0", bytes(16)), ("a/constants.pkl", b"N."), *entries])


def test_code_is_never_opened_whatever_it_unpacks_to(tmp_path: Path) -> None:
    """A compressed entry of code may say what it likes: nobody unpacks it."""
    file, path = io.BytesIO(archive()), tmp_path / "bomb.pt"
    with zipfile.ZipFile(file, "a", zipfile.ZIP_DEFLATED, compresslevel=1) as writer:
        for number in range(4):
            writer.writestr(f"a/code/{number}.py", bytes(1 << 26))
    path.write_bytes(file.getvalue())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert read_weights(path) == {}
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 15
    path.write_bytes(file.getvalue().replace(b"a/code/0.py", b"a/data/9.py"))
    with pytest.raises(CheckpointError, match=r"a/data/9\.py in the zip archive is compressed or encrypted"):
        read_weights(path)


def twice(depth: int) -> bytes:
    """A part with a part that it has twice, which has a part that it has twice, and so on."""
    body = code(call("__torch__.P"))
    for _ in range(depth):
        attributes = code("left") + body + b"q\x07" + code("right") + b"h\x07"
        body = code(name("__torch__.P")) + b")\x81}(" + attributes + b"ub"
    return body


HOSTILE: dict[str, tuple[Callable[[], bytes], str]] = {
    "a function of another module": (lambda: archive(body=call("os.system", "true")), r"refers to os\.system"),
    "a list": (lambda: archive(body=[tensor()]), "holds no module"),
    "a class and no object": (lambda: archive(body=name("__torch__.P")), "holds no module"),
    "parts without number": (lambda: archive(body=twice(60)), "stands for more than"),
    "parts in parts without end": (lambda: archive(body=twice(300)), "levels deep|stands for more than"),
    "a list that is none": (lambda: archive(body=call("torch.jit._pickle.build_intlist", 1)), "holds no module"),
    "a class of its own in a checkpoint": (
        lambda: zip_bytes([("a/data.pkl", program(call("__torch__.P")))]),
        r"refers to __torch__\.P",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_an_archive_made_to_do_harm_is_refused(tmp_path: Path, case: str) -> None:
    make, said = HOSTILE[case]
    path = tmp_path / "policy.pt"
    path.write_bytes(make())
    with watching(), pytest.raises(CheckpointError, match=said):
        load(path)


def test_a_part_that_stores_itself_in_its_own_form_is_named(tmp_path: Path) -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.ones(3)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.w

        @torch.jit.export
        def __getstate__(self) -> tuple[Tensor, bool]:
            return self.w, self.training

        @torch.jit.export
        def __setstate__(self, state: tuple[Tensor, bool]) -> None:
            self.w = state[0]
            self.training = state[1]

    path = saved(nn.Sequential(Packed()), tmp_path / "packed.pt")
    with pytest.raises(CheckpointError, match=r"0 is a .*Packed, which stores itself in a form of its own"):
        read_weights(path)


def test_an_archive_cut_short_anywhere_is_refused(tmp_path: Path) -> None:
    path = saved(Policy(), tmp_path / "policy.pt")
    data = path.read_bytes()
    for size in range(4, len(data), 997):
        path.write_bytes(data[:size])
        with pytest.raises(CheckpointError, match=r"policy\.pt: the zip archive has no directory"):
            read_weights(path)


def test_an_importer_reads_an_archive_of_its_code(tmp_path: Path) -> None:
    config, model = small_config(), nn.Module()
    state = random_state(config)
    for key, values in state.items():
        part = model
        *path, last = key.split(".")
        for place in path:
            if place not in dict(part.named_children()):
                part.add_module(place, nn.Module())
            part = part.get_submodule(place)
        part.register_buffer(last, values)
    imported, source = read_checkpoint(saved(model, tmp_path / "model.pt"), config=config)
    assert source.container == "TorchScript"
    assert imported.family == "txl"
    assert imported.weights.keys() == read_checkpoint(state, config=config)[0].weights.keys()
    with pytest.raises(
        ScriptedError, match=r"policy\.pt: this is a TorchScript archive, .* its 10 tensors fit no known"
    ):
        read_checkpoint(saved(Policy(), tmp_path / "policy.pt"))


def test_sileros_archive_is_read_as_torch_reads_it() -> None:
    path = PACKAGES / "silero_vad" / "data" / "silero_vad.jit"
    if not path.exists():
        pytest.skip("silero-vad is not installed; make packages")
    expected, found = torch.jit.load(path).state_dict(), read_weights(path)
    assert len(expected) == 30
    assert same({key: found[key] for key in expected}, expected)
    assert found.keys() - expected.keys() == {"_state", "_context"}
