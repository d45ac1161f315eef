"""A file of n bytes takes at most a multiple of n: every program that asks for more is refused while it asks."""

import collections
import pickle  # noqa: TID251 - the tests write what others wrote with it
import tracemalloc

import amplifiers
import pytest
import torch
from pickle_programs import program, write_zip, zip_bytes
from torch import nn
from txl_export.checkpoints.files import budget as budgets
from txl_export.checkpoints.files.budget import FREE, PER_BYTE, Budget
from txl_export.checkpoints.files.loading import load_file, module_state, scan_globals
from txl_export.checkpoints.files.pickle_names import Stub, checked_key
from txl_export.checkpoints.plain_weights import read_stored
from txl_runtime.errors import CheckpointError

SIZE = 1 << 15
MORE = "asks for more than|stands for more than|expected at most 16"
MOST_MEMORY, CONSTANT = 256, 64 << 20


def read(path):
    """Whatever the project makes of a file: what it holds, a module's tensors, arrays as tensors."""
    content = load_file(path).content if path.suffix == ".pt" else read_stored(path)
    return module_state(content)[0] if isinstance(content, Stub) else content


def peak(path):
    """The refusal, and the most memory that Python held until then."""
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=MORE) as refusal:
            read(path)
        return str(refusal.value), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.fixture
def charged(monkeypatch):
    """The budgets that are made, with what is left of them."""
    made, init = [], Budget.__init__

    def watched(self, size):
        init(self, size)
        made.append(self)

    monkeypatch.setattr(Budget, "__init__", watched)
    return made


@pytest.mark.parametrize("amplifier", amplifiers.IN_CONTAINERS)
def test_a_program_in_a_container_that_asks_for_much_is_refused(tmp_path, charged, amplifier):
    path = tmp_path / "model.pt"
    body = amplifiers.IN_CONTAINERS[amplifier](SIZE)
    elements = SIZE // 2 if amplifier == "windows" else 16
    path.write_bytes(zip_bytes([("a/data.pkl", program(body)), ("a/data/0", bytes(elements))]))
    _, most = peak(path)
    size = path.stat().st_size
    assert most < MOST_MEMORY * size + CONSTANT
    assert all(budget.size == size for budget in charged if budget.size)
    # No single thing is done before it is charged: what went beyond the budget is one step.
    assert all(budget.left > -PER_BYTE * size - FREE for budget in charged)


@pytest.mark.parametrize("amplifier", [*amplifiers.IN_PICKLES, "arrays"])
def test_a_program_in_a_pickle_that_asks_for_much_is_refused(tmp_path, amplifier):
    body = (amplifiers.IN_PICKLES | amplifiers.LATER)[amplifier]
    path = tmp_path / "model.pkl"
    path.write_bytes(program(body(SIZE), 4))
    _, most = peak(path)
    assert most < MOST_MEMORY * path.stat().st_size + CONSTANT


@pytest.mark.parametrize("amplifier", ["shared modules", "long module names"])
def test_a_module_whose_parts_are_shared_without_end_is_refused(tmp_path, amplifier):
    path = tmp_path / "model.pt"
    write_zip(path, amplifiers.LATER[amplifier](SIZE))
    _, most = peak(path)
    assert most < MOST_MEMORY * path.stat().st_size + CONSTANT


def test_names_are_shown_up_to_where_a_program_asks_for_too_many(tmp_path):
    path = tmp_path / "model.pkl"
    path.write_bytes(program(amplifiers.joined_names(1 << 20), 4))
    assert len(scan_globals(path)) == 1


def test_an_integer_of_a_megabyte_and_texts_that_are_cut_are_refused(tmp_path):
    path = tmp_path / "model.pt"
    for body in (
        b"\x8b\x00\x00\x10\x00" + bytes(1 << 20),  # LONG4 of 0s, read in one pass
        b"\x8b\x00\x00\x10\x00" + b"\x7f" * (1 << 20),
        b"r\xff\xff\xff\xff",
        b"\x8d" + b"\xff" * 8 + b"x",
        b"\x96" + b"\xff" * 8 + b"x",
        b"\x95" + b"\xff" * 8 + b"\x97",
    ):
        write_zip(path, body)
        if body == b"\x8b\x00\x00\x10\x00" + bytes(1 << 20):
            assert load_file(path).content == 0
            continue
        with pytest.raises(CheckpointError):
            load_file(path)


def test_honest_files_need_less_than_half(tmp_path, charged):
    module = nn.Sequential(nn.Linear(9, 9), nn.LSTM(8, 8, 3), nn.Embedding(7, 3))
    adam = torch.optim.Adam(module.parameters())
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    adam.step()
    words = [f"word{i}" for i in range(9000)]
    numbers = torch.randperm(len(words)).tolist()
    contents = {
        "training.pt": {"model": module.state_dict(), "optimiser": adam.state_dict()},
        "vocabulary.pt": {"symbols": words, "ids": collections.OrderedDict(zip(words, numbers, strict=True))},
        "counts.pt": collections.Counter(dict(zip(words, numbers, strict=True))),
        "numbers.pt": dict(zip(numbers, words, strict=True)),
        "pairs.pt": {(i, 2 * i): 0 for i in numbers},
        "ranks.pt": {(words[i], words[i - 1]): i for i in numbers},
        "fractions.pt": {i / 7: None for i in numbers},
        "sets.pt": [set(numbers), frozenset(words), [torch.Size([2, 3])] * 1000],
        "state.pkl": module.state_dict(),
    }
    for file, content in contents.items():
        path = tmp_path / file
        if path.suffix == ".pkl":
            path.write_bytes(pickle.dumps(content))
        else:
            torch.save(content, path)
        charged.clear()
        load_file(path, others=True)
        for budget in charged:
            assert PER_BYTE * budget.size + FREE - budget.left <= (PER_BYTE * budget.size + FREE) / 2, file


def test_what_is_charged_is_counted():
    budget = Budget(100)
    assert budget.left == PER_BYTE * 100 + FREE
    budget.charge(budget.left)
    with pytest.raises(CheckpointError, match="more than 4 steps of work for each of its 100 bytes"):
        budget.charge(1)
    assert budget.again().left == PER_BYTE * 100 + FREE
    many = dict.fromkeys(range(2 * budgets.FEW))
    for key, entries, work in [
        ("x" * 160, {}, 10),
        (("x" * 160, "y"), many, 12),
        (3, many, 0),
        (1 << 50, many, 1),
        (1 << 50, many, 2),
        ((1 << 61) - 1 + (1 << 50), many, 3),
        (0.5, {}, 0),
    ]:
        before = budget.left
        budget.left += 100
        budget.charge_key(key, entries)
        assert before + 100 - budget.left == work, key


CHARGED = ["encoded", "counters", "ordered dictionaries", "keys in tuples", "keys of mappings"]


@pytest.mark.parametrize("amplifier", CHARGED)
def test_what_makes_much_is_charged_before_it_is_made(tmp_path, amplifier):
    """Not by the walk through what was read, when the memory is already taken."""
    path = tmp_path / "model.pt"
    write_zip(path, amplifiers.IN_CONTAINERS[amplifier](SIZE))
    message, _ = peak(path)
    assert "asks for more than" in message


def test_a_charge_beyond_the_budget_is_refused():
    for charge in (
        lambda budget: budget.charge(1 << 30),
        lambda budget: budget.charge_key(("x",) * (1 << 20), {}),
        lambda budget: checked_key((None,) * (1 << 18) + ([],), {}, budget),  # before its parts are looked at
    ):
        with pytest.raises(CheckpointError, match="asks for more than 4 steps of work for each of its 100 bytes"):
            charge(Budget(100))
