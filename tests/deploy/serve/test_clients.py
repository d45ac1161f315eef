"""The real clients against a real server: the `openai` package, and lm-eval with tasks of its own."""

from __future__ import annotations

import json
import math
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import txl_runtime
from serving import serving
from support import call_main, clients

HERE = Path(__file__).parent / "clients"
TEXTS = ["It was a dark night. " * 6, "Nothing else happened, or so they said; é €." * 3, "x", "all's well"]
CHOICES = [("a b c", [" d", " zzzz", " q"]), ("once upon a", [" time", " tome"]), ("é", ["é", "e"])]


def run(*command: object, **environment: str) -> str:
    """Run a client's program, which has to succeed; returns its output."""
    done = subprocess.run(
        [*map(str, command)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout


@pytest.mark.slow
def test_the_openai_package(letters):
    python = clients()
    with serving(letters, TXL_DEPLOY_TOKEN="secret-token") as server:
        assert "all of it" in run(python, HERE / "with_openai.py", server.url, "secret-token")
        assert server.end() == 0
    lines = [json.loads(line) for line in server.log.splitlines()]
    requests = [line for line in lines if line["event"] == "request"]
    assert {line["status"] for line in requests} == {200, 400, 401, 404, 413, 499}
    assert not any(word in server.log for word in ("once upon", "mine", "secret-token")), "no text, name or token"


@pytest.mark.slow
def test_lm_eval_measures_what_score_measures(letters, tmp_path, monkeypatch, capfd):
    python = clients()
    write_tasks(tmp_path)
    arguments = {
        "model": "small",
        "max_length": 1_000_000,
        "num_concurrent": 4,
        "tokenizer_backend": "remote",
    }
    with serving(letters) as server:
        listed = ",".join(f"{name}={value}" for name, value in arguments.items())
        run(
            *(python, "-m", "lm_eval", "run", "--model", "local-completions", "--include_path", tmp_path / "tasks"),
            *("--model_args", f"base_url={server.url}/v1/completions,{listed}"),
            *("--tasks", "own_rolling,own_choice,own_generate", "--output_path", tmp_path / "out", "--log_samples"),
            HF_HUB_OFFLINE="1",
            HF_DATASETS_OFFLINE="1",
            HF_HOME=str(tmp_path / "hf"),
        )
    (results,) = (tmp_path / "out").rglob("results_*.json")
    found = json.loads(results.read_text())["results"]
    samples = {
        name: [
            json.loads(line)
            for path in (tmp_path / "out").rglob(f"samples_{name}_*.jsonl")
            for line in path.read_text("utf-8").splitlines()
        ]
        for name in ("own_rolling", "own_choice", "own_generate")
    }
    rolling(found, samples["own_rolling"], letters, tmp_path, monkeypatch, capfd)
    model = txl_runtime.load(letters, "cpu", threads=1)
    choosing(samples["own_choice"], model)
    generating(samples["own_generate"], model)


def rolling(found, samples, letters, tmp_path, monkeypatch, capfd) -> None:
    """Log-likelihoods of whole documents, each behind the boundary token, as `txl-deploy score` has them."""
    assert len(samples) == len(TEXTS)
    total = 0.0
    for sample in samples:
        text = sample["doc"]["text"]
        file = tmp_path / "document.txt"
        file.write_bytes(b"\n" + text.encode())
        code, out, _ = call_main(("score", file.parent / letters, file, "--json"), monkeypatch, capfd)
        assert code == 0
        nll = json.loads(out)["nll"] * len(text.encode())
        assert abs(float(sample["filtered_resps"][0]) + nll) < 1e-4 * len(text.encode())
        total += nll
    bits = total / math.log(2) / sum(len(text.encode()) for text in TEXTS)
    assert abs(found["own_rolling"]["bits_per_byte,none"] - bits) < 1e-4


def choosing(samples, model) -> None:
    """Every choice's log-likelihood behind its context, and whether it is what the model would say."""
    assert len(samples) == len(CHOICES)
    for sample, (context, choices) in zip(sorted(samples, key=lambda each: each["doc_id"]), CHOICES, strict=True):
        for (said, greedy), choice in zip(sample["filtered_resps"], choices, strict=True):
            ids = [*context.encode(), *choice.encode()]
            rows = model.stream(1).feed(np.array([ids[:-1]]))[0][len(context.encode()) - 1 :]
            own = [float(row[token]) for row, token in zip(rows, choice.encode(), strict=True)]
            assert abs(float(said) - sum(own)) < 1e-3
            assert str(greedy) == str([int(row.argmax()) for row in rows] == list(choice.encode()))


def generating(samples, model) -> None:
    """The most probable text up to a stop text."""
    for sample in samples:
        prompt = sample["doc"]["prompt"].encode()
        tokens = [int(token[0]) for token in model.stream(1).generate(list(prompt), 40, temperature=0.0)]
        text = bytes(tokens).decode(errors="replace")
        ends = [text.index(stop) for stop in ("zz", "\n") if stop in text]
        assert sample["resps"][0][0] == text[: min(ends, default=len(text))]


def write_tasks(folder: Path) -> None:
    """Three tasks with their documents, in the form that lm-eval's guide for new tasks has."""
    (folder / "tasks").mkdir()
    documents = {
        "own_rolling": [{"text": text} for text in TEXTS],
        "own_choice": [{"prompt": prompt, "choices": choices, "label": 0} for prompt, choices in CHOICES],
        "own_generate": [{"prompt": prompt, "answer": ""} for prompt in ("ab", "once upon a time", "é")],
    }
    special = {
        "own_rolling": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - metric: bits_per_byte
""",
        "own_choice": """
output_type: multiple_choice
doc_to_text: "{{prompt}}"
doc_to_target: label
doc_to_choice: choices
target_delimiter: ""
metric_list:
  - metric: acc
""",
        "own_generate": """
output_type: generate_until
doc_to_text: "{{prompt}}"
doc_to_target: answer
generation_kwargs:
  until: ["zz"]
  max_gen_toks: 40
  temperature: 0
metric_list:
  - metric: exact_match
""",
    }
    for name, lines in documents.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(line) + "\n" for line in lines))
        head = f"task: {name}\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {data}\ntest_split: test\n"
        (folder / "tasks" / f"{name}.yaml").write_text(head + special[name].lstrip())
