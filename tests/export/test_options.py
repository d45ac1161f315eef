"""The options of an export stand in one place: Python, the flags and the checks read them there."""

from __future__ import annotations

import inspect
import subprocess
import sys

import numpy as np
import pytest
import txl_export
from txl_export.options import ExportOptions, flags_of_export
from txl_runtime.errors import UsageError

from txl_deploy.verbs import command


def test_export_takes_every_option_by_name_with_its_default():
    of_export, of_options = (inspect.signature(each).parameters for each in (txl_export.export, ExportOptions))
    assert list(of_export) == ["checkpoint_or_state", "out", *of_options]
    assert [of_export[name].default for name in of_options] == [each.default for each in of_options.values()]
    assert all(name in (txl_export.export.__doc__ or "") for name in flags_of_export())


def test_every_option_but_the_listener_has_a_flag():
    assert set(flags_of_export()) == set(inspect.signature(ExportOptions).parameters) - {"listener"}
    offered = {name for parameter in command("export").params for name in parameter.opts + parameter.secondary_opts}
    assert {name for flag in flags_of_export().values() for name in flag.names.split("/")} <= offered


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"memory": "both"}, "memory is 'both', expected kv or hidden; check --memory"),
        ({"precision": "fp8"}, "precision is 'fp8', expected one of fp32, fp16, bf16, int8, int4; check --precision"),
        ({"segment_length": "64"}, "segment_length is '64', expected whole numbers"),
    ],
)
def test_what_means_nothing_for_any_checkpoint_is_refused(given, message, tmp_path):
    for function in (ExportOptions, lambda **options: txl_export.export({}, tmp_path / "a.txl", **options)):
        with pytest.raises(UsageError) as refused:
            function(**given)
        assert str(refused.value) == message


@pytest.mark.parametrize("given", [64, [64], (np.int64(64),)])
def test_segment_lengths_are_plain_numbers(given):
    lengths = ExportOptions(segment_length=given).segment_lengths
    assert lengths == (64,)
    assert type(lengths[0]) is int


@pytest.mark.parametrize(
    ("given", "sizes"), [((), (1,)), (4, (4,)), ([1, 16, 4, 1], (1, 16, 4)), ((np.int64(2),), (2,))], ids=str
)
def test_batch_sizes_are_one_or_several(given, sizes):
    assert ExportOptions(batch_size=given).batch_sizes == sizes


def test_the_flags_are_known_without_torch_and_onnx():
    code = "import sys, txl_deploy.commands.export; print({'torch', 'onnx', 'onnxruntime'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"
