"""The configurations of packages, from tables of every kind."""

from __future__ import annotations

from step_models import B, counting, growing, recurrent
from txl_runtime.bundle.reading import open_bundle

from txl_deploy.triton.config import generation_config, stepping_config, to_text


def config(tmp_path, model):
    return stepping_config(open_bundle(model.write(tmp_path / "a.txl")).manifest, 16, 2.5, "cpu")


def test_tokens_are_ragged_and_have_the_last_row_and_the_best_token_besides(tmp_path):
    made = config(tmp_path, counting())
    assert made["max_batch_size"] == B
    assert made["input"] == [{"name": "tokens", "data_type": "TYPE_INT32", "dims": [-1], "allow_ragged_batch": True}]
    assert [(output["name"], output["dims"]) for output in made["output"]] == [
        ("logits", [-1, 11]),
        ("last", [11]),
        ("next", [1]),
    ]
    assert made["sequence_batching"] == {
        "max_sequence_idle_microseconds": 2_500_000,
        "oldest": {"max_candidate_sequences": 16, "max_queue_delay_microseconds": 300},
    }


def test_axes_of_sequences_are_the_server_s_wherever_they_stand(tmp_path):
    made = config(tmp_path, recurrent())
    assert made["input"] == [
        {"name": "obs", "data_type": "TYPE_FP32", "dims": [-1, 5]},
        {"name": "starts", "data_type": "TYPE_BOOL", "dims": [1], "reshape": {"shape": []}},
    ]
    assert [(output["name"], output["dims"]) for output in made["output"]] == [
        ("best", [-1, 2]),
        ("which", [-1, 2]),
        ("total", [-1]),
        ("known", [1]),
    ]


def test_sequences_in_lockstep_run_one_by_one(tmp_path):
    made = config(tmp_path, growing())
    assert made["max_batch_size"] == 1
    assert made["sequence_batching"]["oldest"]["max_candidate_sequences"] == 16


def test_text_of_every_kind_of_value():
    text = to_text({"a": 1, "b": True, "c": 'x"\\\n', "d": [1, -1], "e": [{"f": []}, {"g": {"h": 2}}]})
    assert text == (
        'a: 1\nb: true\nc: "x\\042\\134\\012"\nd: [ 1, -1 ]\n'
        "e [\n  {\n    f: [  ]\n  },\n  {\n    g {\n      h: 2\n    }\n  }\n]"
    )
    assert "decoupled: true" in to_text(generation_config("cpu", 1.0))
