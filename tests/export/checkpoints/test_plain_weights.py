"""Weights for a module of the user's own are read from a file, and nothing in it is run."""

from __future__ import annotations

import pytest
import torch
from stand_ins.small_steps import Policy
from torch import nn
from txl_export import read_weights
from txl_runtime.errors import CheckpointError, UsageError


def test_a_state_dict_is_read(tmp_path):
    path = tmp_path / "model.pt"
    module = Policy()
    torch.save({"model": module.state_dict(), "step": 3}, path)
    found = read_weights(str(path))
    assert found["step"] == 3
    assert all(torch.equal(found["model"][name], tensor) for name, tensor in module.state_dict().items())


def test_a_whole_module_of_an_unknown_class_gives_its_state_dict(tmp_path):
    path = tmp_path / "whole.pt"
    module = nn.DataParallel(Policy())
    torch.save(module, path)
    found = read_weights(path)
    assert list(found) == list(module.module.state_dict())
    assert all(torch.equal(found[name], tensor) for name, tensor in module.module.state_dict().items())


def test_what_holds_no_weights_is_refused(tmp_path):
    path = tmp_path / "list.pt"
    torch.save([1, 2], path)
    with pytest.raises(CheckpointError, match="holds a list, expected a state dict"):
        read_weights(path)
    with pytest.raises(CheckpointError, match="no such file"):
        read_weights(tmp_path / "none.pt")
    with pytest.raises(UsageError, match="no weights were given"):
        read_weights(None)


def test_a_dictionary_with_objects_of_unknown_classes_is_refused(tmp_path):
    path = tmp_path / "mixed.pt"
    torch.save({"model": Policy().state_dict(), "module": Policy()}, path)
    with pytest.raises(CheckpointError, match=r"refers to stand_ins\.small_steps\.Policy, torch.* not known here"):
        read_weights(path)
