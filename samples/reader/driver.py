"""Lets a test runner drive this reader by the protocol of conformance/README.md: one JSON object per line, in and
out.
"""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import onnxruntime as ort
from reader import TYPES, Array, Bundle, RefusedError, Stream, need
from words import decode, encode, generate, score, self_test, vocabulary_of

Request = dict[str, Any]
Reply = dict[str, Any]
SCHEMA = json.loads((Path(__file__).parents[2] / "docs/bundle-format.schema.json").read_bytes())
SUPPORTS = """
padding idle cut last fill spill initial reset select snapshot rows limit commit lookahead lockstep grows open
score greedy draws apart temperature top_k top_p clusters text selftest refusals int8 half old
"""
# The ability "strangers" is missing in SUPPORTS: this reader checks no graph, and is for trusted bundles.
OF_A_MODEL = ("open", "encode", "decode", "selftest")
OF_A_STREAM = ("run", "feed", "score", "generate", "reset", "select", "save", "restore", "take", "put", "state")


def to_json(array: Array) -> dict[str, Any]:
    """Return an array as the protocol writes it: its dtype, its shape, e.g. [2], and its values in base64."""
    names = {dtype: name for name, dtype in TYPES.items()}
    data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    return {"dtype": names[array.dtype], "shape": list(array.shape), "data": data}


def from_json(array: dict[str, Any]) -> Array:
    """Return the array that `to_json` converted to an object, e.g. an int32 array [2]."""
    return np.frombuffer(base64.b64decode(array["data"], validate=True), TYPES[array["dtype"]]).reshape(array["shape"])


class Driver:
    """The reader behind the protocol: it holds one model and one stream, and has a method for each request."""

    model: Bundle
    stream: Stream
    rule: str | None = None
    opened = False

    def hello(self, r: Request) -> Reply:
        """Return this reader's name and abilities."""
        return {
            "name": "reader.py",
            "version": "1.0",
            "engine": f"ONNX Runtime {ort.__version__}",
            "supports": SUPPORTS.split(),
        }

    def load(self, r: Request) -> Reply:
        """Check a bundle and load the graphs of an update rule."""
        bundle = Bundle(r["path"])
        jsonschema.validate(bundle.manifest, SCHEMA)
        rule = bundle.rule(r.get("update"))
        for program in bundle.manifest["programs"]:
            if program["update"] in (rule, "none") and program["kind"] != "attention":
                bundle.session(program)
        self.model, self.opened, self.rule = bundle, False, rule
        return {"update": rule}

    def open(self, r: Request) -> Reply:
        """Open a stream of the loaded model, in place of the stream before it."""
        self.stream = Stream(self.model, r["b"], self.rule, r.get("memory_length"))
        self.opened = True
        return {}

    def run(self, r: Request) -> Reply:
        """Run a segment; return its outputs."""
        inputs = {name: from_json(array) for name, array in r["inputs"].items()}
        outputs = self.stream.run(inputs, r.get("counts"), r.get("commit", True))
        return {"outputs": {name: to_json(array) for name, array in outputs.items()}}

    def feed(self, r: Request) -> Reply:
        """Run any number of positions; return their outputs."""
        inputs = {name: from_json(array) for name, array in r["inputs"].items()}
        outputs = self.stream.feed(inputs, r.get("counts"), r.get("last", False))
        return {"outputs": {name: to_json(array) for name, array in outputs.items()}}

    def score(self, r: Request) -> Reply:
        """Return the negative log-probability of each token but the first."""
        return {"nll": to_json(score(self.stream, from_json(r["tokens"]), r.get("counts")))}

    def generate(self, r: Request) -> Reply:
        """Feed prompts and draw tokens; return the drawn tokens and their log-probabilities."""
        way = {name: r[name] for name in ("temperature", "top_k", "top_p", "seed") if r.get(name) is not None}
        tokens, logprobs = generate(self.stream, from_json(r["tokens"]), r["count"], r.get("counts"), **way)
        return {"tokens": to_json(tokens), "logprobs": to_json(logprobs)}

    def reset(self, r: Request) -> Reply:
        """Reset sequences to their first state."""
        self.stream.reset(r.get("rows"))
        return {}

    def select(self, r: Request) -> Reply:
        """Let sequence i continue what sequence rows[i] was."""
        self.stream.select(r["rows"])
        return {}

    def save(self, r: Request) -> Reply:
        """Return a snapshot of all sequences, or of one (the request "take")."""
        return {"bytes": base64.b64encode(self.stream.save([r["row"]] if "row" in r else None)).decode()}

    def restore(self, r: Request) -> Reply:
        """Restore all sequences from a snapshot, or one (the request "put")."""
        self.stream.restore(base64.b64decode(r["bytes"], validate=True), [r["row"]] if "row" in r else None)
        return {}

    take, put = save, restore

    def state(self, r: Request) -> Reply:
        """Return all states, and the number of filled memory rows of each sequence."""
        arrays = {name: to_json(array) for name, array in self.stream.table().items()}
        return {"states": arrays, "fill": self.stream.fill[: self.stream.b].tolist()}

    def encode(self, r: Request) -> Reply:
        """Return the tokens of a text."""
        return {"tokens": to_json(np.array(encode(vocabulary_of(self.model), base64.b64decode(r["bytes"])), np.int32))}

    def decode(self, r: Request) -> Reply:
        """Return the text of tokens."""
        text = decode(vocabulary_of(self.model), from_json(r["tokens"]).tolist())
        return {"bytes": base64.b64encode(text).decode()}

    def selftest(self, r: Request) -> Reply:
        """Replay the bundle's stored vectors; return True if no difference is above its limit."""
        return {"passed": all(worst <= limit for worst, limit in self_test(self.model, self.rule).values())}

    def answer(self, request: Request) -> Reply:
        """Return the answer to a request, or an error: its text, and its kind, e.g. "usage"."""
        do = request["do"]
        try:
            need(do in ("hello", "load", *OF_A_MODEL, *OF_A_STREAM), f"{do!r} is not known here.", "unsupported")
            need(self.rule or do in ("hello", "load"), "No bundle was loaded.")
            need(self.opened or do not in OF_A_STREAM, "No stream was opened.")
            return {"id": request["id"], "ok": getattr(self, do)(request)}
        except RefusedError as error:
            sentence, kind = error.args
        except Exception as error:
            sentence, kind = f"{type(error).__name__}: {error}", "bundle" if do == "load" else "usage"
            kind = "backend" if type(error).__module__.startswith("onnxruntime") else kind
        line = "".join(c if c.isprintable() else " " for c in sentence)[:300]
        return {"id": request["id"], "refused": line, "kind": kind}


if __name__ == "__main__":
    driver = Driver()
    for text in sys.stdin:
        print(json.dumps(driver.answer(json.loads(text))), flush=True)
