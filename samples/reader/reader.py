"""A reader of bundles of format 2, written from the page bundle-format.md only; "§" are that page's sections.

It needs NumPy, ONNX Runtime and safetensors. It leaves out most of § 11 (strangers' graphs), so open only bundles that
you trust, or give the SHA-256 of a manifest that you trust, which covers all other files. words.py scores and draws
tokens, encodes and decodes text (§§ 5, 7, 8), and replays stored vectors (§ 9).

    stream = Stream(Bundle("folder"), b=2)
    outputs = stream.run({"tokens": ids}, counts=[4, 2])
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from safetensors import safe_open
from safetensors.numpy import load, save

Array = np.ndarray
Arrays = dict[str, Array]
Table = dict[str, Any]
Counts = Sequence[int] | Array | None
TYPES = {"bool": np.dtype(bool), "int32": np.dtype("i4"), "float32": np.dtype("f4"), "float16": np.dtype("f2")}
PART = r'[^<>:"|?*\\/\x00-\x1f]*[^<>:"|?*\\/\x00-\x1f. ]'
DEFAULTS: dict[str, Table] = {
    "inputs": {"lookahead": 0},
    "outputs": {"role": "feature", "clusters": []},
    "programs": {"opset": {}},
    "states": {"dtype": "float32", "batch_axis": 0, "row_axis": None, "rows": None, "absent": False, "initial": None},
}


class RefusedError(ValueError):
    """A refusal with a kind ("bundle", "usage", "backend" or "unsupported") and a sentence with the reason."""


def need(condition: Any, sentence: str, kind: str = "usage") -> None:
    """Raise RefusedError with a sentence unless a condition holds."""
    if not condition:
        raise RefusedError(sentence, kind)


class Bundle:
    """A folder with a model: its manifest and files, checked, and its graphs, which are loaded when they first run."""

    def __init__(self, folder: str | Path, manifest_sha256: str | None = None, hashes: bool = True) -> None:
        """Read the manifest, and check it and the files that it uses; with `hashes` False, their hashes are not."""
        self.folder, self.sessions = Path(folder), dict[str, ort.InferenceSession]()
        data = self._plain("manifest.json").read_bytes()
        trusted = manifest_sha256 in (None, hashlib.sha256(data).hexdigest()) and len(data) <= 16 << 20
        need(trusted, "manifest.json is too large, or not the trusted one.", "bundle")
        m = self.manifest = json.loads(data.decode())
        json.dumps(m, ensure_ascii=False).encode()  # fails for a lone half of a surrogate pair
        version = str(m["format_version"])
        need(m["format"] == "txl-deploy.bundle", f"{m['format']!r} is not the format of bundles.", "bundle")
        need(re.fullmatch(r"2(\.\d+)?", version), f"Format {version} is not 2.x.", "bundle")
        derive(m)
        self.B, self.lockstep, self.exact = m["batch_size"], m["streams"] == "lockstep", m["lengths"] == "exact"
        self.inputs, self.outputs = ({row["name"]: row for row in m[table]} for table in ("inputs", "outputs"))
        self.given = {name: row for name, row in self.inputs.items() if row["role"] in ("tokens", "feature")}
        self.logprobs = next((name for name, row in self.outputs.items() if row["role"] == "logprobs"), "")
        self.counters = {row["role"]: row["counter"] for row in m["inputs"] if row["counter"]}
        self.steps = [p for p in m["programs"] if p["update"] != "none"]
        self.rules = {p["update"]: p["kind"] for p in self.steps}
        used = [m["weights"], m["vocabulary"], m["selftest"], *(p["file"] for p in m["programs"])]
        self.used = {name for name in used if name}
        self._check()
        for name, listed in m["files"].items():
            if name.startswith("engines/") and name not in self.used:
                continue
            path = self._plain(name)
            same = path.stat().st_size == listed["size"]
            same = same and (not hashes or hashlib.sha256(path.read_bytes()).hexdigest() == listed["sha256"])
            need(same, f"{name!r} has another size or hash than is listed.", "bundle")

    def _check(self) -> None:
        """Refuse tables that this reader would compute wrongly."""
        m, most = self.manifest, self.counters.get("fill", {}).get("most")
        lengths = {p["segment_length"] for p in self.steps}
        of_rule = {(p["update"], p["kind"], p["segment_length"]) for p in self.steps}
        names = [(t, row["name"], row["update"] if t == "states" else "") for t in DEFAULTS for row in m[t]]
        ports, rings = [*m["inputs"], *m["outputs"]], [s for s in m["states"] if s["update"] == "ring"]
        shared = [s for s in m["states"] if s["batch_axis"] is None]
        places = all(row["shape"][0] == "B" and "L" not in row["shape"][2:] for row in ports)
        types = {row["dtype"] for row in ports + m["states"]}
        need(places and types <= TYPES.keys(), "This reader lacks a type, or an order of axes.", "unsupported")
        rules = {
            "a file is not listed": self.used <= m["files"].keys(),
            "two files differ in case alone": len({name.lower() for name in m["files"]}) == len(m["files"]),
            "a table has a name twice": len(names) == len(set(names)),
            "there is an unknown rule, or none": self.rules and self.rules.keys() <= {"ring", "rolled", "replace"},
            "a rule lacks a length or mixes kinds": of_rule == {(*r, n) for r in self.rules.items() for n in lengths},
            "a counter starts above its most": all(c["start"] <= c["most"] for c in self.counters.values()),
            "an axis is not B": all(s["shape"][s["batch_axis"]] == self.B for s in m["states"] if s not in shared),
            "sequences that are alone share a state": self.lockstep or not shared,
            "a ring is too small": all(
                s["shape"][s["row_axis"]] == s["slots"] + s["spill"] and s["slots"] >= most + max(lengths)
                for s in rings
            ),
        }
        for sentence, holds in rules.items():
            need(holds, f"The tables disagree: {sentence}.", "bundle")

    def _plain(self, name: str) -> Path:
        """Return the path of a plain file inside the folder (§ 1)."""
        path = self.folder / name
        need(
            re.fullmatch(f"{PART}(/{PART})*", name)
            and path.is_file()
            and path.resolve() == self.folder.resolve() / name,
            f"{name!r} is no plain file of the folder.",
            "bundle",
        )
        return path

    def shape(self, row: Table, length: int, b: int) -> list[int]:
        """Return the shape of an input or output for a segment of some length and b sequences."""
        sizes = {"B": b, "L": length + row.get("lookahead", 0)}
        return [sizes.get(size, size) for size in row["shape"]]

    def session(self, program: Table) -> ort.InferenceSession:
        """Return the session of a program's graph, opened on the first call; the graph names its file of weights."""
        name = program["file"]
        if name not in self.sessions:
            version = [int(part) for part in ort.__version__.split(".")[:2]]
            able = program["opset"].get("ai.onnx", 0) < 24 or version >= [1, 25]
            need(able, f"{program['name']} needs opset 24, which ONNX Runtime has from 1.25 on.", "backend")
            options = ort.SessionOptions()
            options.intra_op_num_threads = options.inter_op_num_threads = 1
            session = ort.InferenceSession(self.folder / name, options, providers=["CPUExecutionProvider"])
            there = [t.name for t in session.get_inputs() + session.get_outputs()]
            listed = [t["name"] for t in program["inputs"] + program["outputs"]]
            need(there == listed, f"{name!r} has {there}, but its row has {listed}.", "bundle")
            self.sessions[name] = session
        return self.sessions[name]

    def softmax(self, hidden: Array) -> Array:
        """Compute log-probabilities of hidden rows with the softmax's programs (§ 6), e.g. [3, 64] → [3, 256]."""
        parts, output = {}, self.outputs[self.logprobs]
        for p in self.manifest["programs"]:
            if p["kind"] == "head" or p["kind"].startswith("tail."):
                parts[p["kind"]] = self.session(p).run(None, {p["inputs"][0]["name"]: hidden})[0].astype(np.float32)
        words = [parts["head"][:, : output["clusters"][0][1]]]
        for c, column in enumerate(output["cluster_columns"], 1):
            words.append(parts["head"][:, [column]] + parts[f"tail.{c}"])
        return np.concatenate(words, axis=1)

    def rule(self, update: str | None = None) -> str:
        """Return `update`, or for None the first of ring, rolled and replace that the bundle has programs of."""
        need(update is None or update in self.rules, f"This bundle has no programs of rule {update!r}.")
        return update or min(self.rules, key=["ring", "rolled", "replace"].index)


def derive(m: Table) -> None:
    """Fill in a manifest's missing fields: the schema's defaults, and fields that format 2.0 lacked (§ 10)."""
    for table, defaults in DEFAULTS.items():
        m[table] = [{**defaults, **row} for row in m[table]]
    m.setdefault("vocabulary", None)
    m.setdefault("selftest", "selftest.npz" if "selftest.npz" in m["files"] else None)
    rings = [s for s in m["states"] if s["update"] == "ring"]
    for s in m["states"]:
        s.setdefault("spill", s["shape"][s["row_axis"]] - s["slots"] if s in rings else 0)
        s.setdefault("in_place", s["update"] == "ring")
        s["memory"] = s["update"] != "replace"
    for s in m["states"]:  # "label" is the state's name in snapshots
        s["label"] = s["name"] if s["memory"] or not any(t["memory"] for t in m["states"]) else "whole/" + s["name"]
    counters = {
        "fill": {**m.get("counters", {}).get("fill", {}), "over": "stay"},
        "head": {"start": 0, "most": rings[0]["slots"] if rings else 0, "over": "wrap"},
    }
    for row in m["inputs"]:
        row.setdefault("counter", counters.get(row["role"]))
        row.setdefault("beyond", "largest" if m["streams"] == "lockstep" else "zero")
    for o in m["outputs"]:
        o.setdefault("cluster_columns", [o["clusters"][0][1] + c for c in range(len(o["clusters"]) - 1)])


def only_counted(row: Table, array: Array, counts: Array) -> Array:
    """Return an input or output with zeros at positions that do not count (§ 4).

    For example, with counts [5, 3] row 1 is 0 from position 3 on.
    """
    ends = np.where(counts > 0, counts + row.get("lookahead", 0), 0)
    mask = np.arange(array.shape[1]) < ends[:, None] if "L" in row["shape"] else ends > 0
    return np.where(mask.reshape(mask.shape + (1,) * (array.ndim - mask.ndim)), array, array.dtype.type(0))


class Stream:
    """A stream of b sequences with their states. Arrays have room for B sequences; entries from b on are unused."""

    def __init__(self, bundle: Bundle, b: int, rule: str | None = None, limit: int | None = None) -> None:
        """Start b sequences, which keep and see `limit` memory rows at most."""
        self.bundle, self.rule = bundle, bundle.rule(rule)
        self._resize(b)
        self.programs = sorted((p for p in bundle.steps if p["update"] == self.rule), key=lambda p: p["segment_length"])
        self.states = [s for s in bundle.manifest["states"] if s["update"] in (self.rule, "replace")]
        self.memory = [s for s in self.states if s["memory"]]
        fill = bundle.counters.get("fill", {"start": 0, "most": 0})
        self.M, self.R = fill["most"], bundle.counters["head"]["most"] if self.rule == "ring" else 1
        need(limit is None or 0 <= limit <= self.M, f"The limit is not within 0 ... {self.M}.")
        self.most = self.M if limit is None else limit
        self.start = min(fill["start"], self.most)
        self.fill, self.head = np.zeros(bundle.B, np.int32), np.zeros(bundle.B, np.int32)
        self.array: Arrays = {s["input"]: np.zeros(s["shape"], TYPES[s["dtype"]]) for s in self.memory}
        self._put(range(bundle.B), self._fresh(bundle.B))

    def _resize(self, b: int) -> None:
        """Set the number of sequences to b, if the bundle has streams of b sequences."""
        fits = b == self.bundle.B if self.bundle.manifest.get("joint") else 1 <= b <= self.bundle.B
        need(fits, f"This bundle has no streams of {b} sequences.")
        self.b = b

    # `_fresh` and `state` return states as snapshots hold them, and `_put` takes such states. Methods below use these.

    def _form(self, s: Table, n: int, rows: int) -> list[int]:
        """Return a state's shape in snapshots, for n sequences with `rows` rows of memory or of a growing state."""
        if s["memory"]:
            return [n, rows, *np.delete(s["shape"], [s["batch_axis"], s["row_axis"]]).tolist()]
        sizes = {s["row_axis"]: rows, s["batch_axis"]: n} if s["rows"] else {s["batch_axis"]: n}
        return [sizes.get(axis, size) for axis, size in enumerate(s["shape"])]

    def _fresh(self, n: int) -> Arrays:
        """Return the state of n new sequences."""
        state = {"fill": np.full(n, self.start, np.int32), "head": np.zeros(n, np.int32)} if self.memory else {}
        for s in self.states:
            value, batch = np.asarray(s["initial"] or 0), 0 if s["memory"] else s["batch_axis"]
            if isinstance(s["initial"], str):
                with safe_open(self.bundle.folder / self.bundle.manifest["weights"], "numpy") as weights:
                    value = weights.get_tensor(s["initial"])
            form = self._form(s, n, s["rows"][0] if s["rows"] else self.start)
            part = [size for axis, size in enumerate(form) if axis != batch]
            value = np.broadcast_to(value.astype(TYPES[s["dtype"]]), part)
            if not s["absent"]:
                state[s["label"]] = value.copy() if batch is None else np.stack([value] * n, batch)
        return state

    def state(self, rows: Sequence[int] | None = None) -> Arrays:
        """Return the state of some sequences, or all, as snapshots hold it: filled memory rows stand last.

        For example, {"layers.00.hidden": [2, 16, 32]}.
        """
        rows = self._sequences(rows)
        state = {"fill": self.fill[rows], "head": self.head[rows]} if self.memory else {}
        for s in self.states:
            array = self.array.get(s["input"])
            if s["memory"]:
                form = self._form(s, len(rows), self.fill[rows].max(initial=0))
                memory = state[s["name"]] = np.zeros(form, np.float32)
                for n, i in enumerate(rows):
                    memory[n, form[1] - self.fill[i] :] = self._front(s)[i, self._places(i)]
            elif array is not None:
                state[s["label"]] = array.copy() if s["batch_axis"] is None else array.take(rows, s["batch_axis"])
        return state

    def table(self) -> Arrays:
        """Return the state of b sequences with the manifest's names and axes: memory in float32, with M rows (§ 5).

        For example, {"layers.00.hidden": [2, 16, 32]}.
        """
        state, tensors = self.state(), {}
        for s in self.states:
            if s["label"] in state:
                value = tensors[s["name"]] = state[s["label"]]
                if s["memory"]:
                    absent = self.M - value.shape[1]
                    value = np.pad(value, [(0, 0), (absent, 0)] + [(0, 0)] * (value.ndim - 2))
                    tensors[s["name"]] = np.moveaxis(value, (0, 1), (s["batch_axis"], s["row_axis"]))
        return tensors

    def _put(self, rows: Sequence[int], state: Arrays) -> None:
        """Set the state of some sequences to `state`, tensors as snapshots hold them."""
        if self.memory:
            self.fill[rows], self.head[rows] = np.minimum(state["fill"], self.most), state["head"] % self.R
        for s in self.states:
            value = state.get(s["label"])
            if s["memory"]:
                memory = state[s["label"]]
                for n, i in enumerate(rows):
                    self._front(s)[i, self._places(i)] = memory[n, memory.shape[1] - self.fill[i] :]
            elif value is None:
                self.array.pop(s["input"], None)
            elif s["batch_axis"] is None:
                self.array[s["input"]] = value
            else:
                shape = [self.bundle.B if axis == s["batch_axis"] else size for axis, size in enumerate(value.shape)]
                if s["input"] not in self.array or list(self.array[s["input"]].shape) != shape:
                    self.array[s["input"]] = np.zeros(shape, value.dtype)
                np.moveaxis(self.array[s["input"]], s["batch_axis"], 0)[rows] = np.moveaxis(value, s["batch_axis"], 0)

    def _front(self, s: Table) -> Array:
        """Return a view of a memory's array with sequences as its first axis and rows as its second."""
        return np.moveaxis(self.array[s["input"]], (s["batch_axis"], s["row_axis"]), (0, 1))

    def _places(self, i: int) -> Array:
        """Return the places of sequence i's memory rows, the oldest first (§ 4)."""
        ring = np.arange(self.head[i] - self.fill[i], self.head[i]) % self.R
        return ring if self.rule == "ring" else np.arange(self.M - self.fill[i], self.M)

    def _sequences(self, rows: Sequence[int] | None, alone: bool = True) -> list[int]:
        """Return the given sequences, or all for None.

        With `alone` False, refuse to take some but not all sequences of a lockstep bundle.
        """
        rows = list(range(self.b)) if rows is None else list(rows)
        need(set(rows) <= set(range(self.b)), f"There are no such sequences: {rows}.")
        need(alone or not rows or len(set(rows)) == self.b or not self.bundle.lockstep, "Lockstep has all or none.")
        return rows

    def reset(self, rows: Sequence[int] | None = None) -> None:
        """Reset the given sequences, or all for None, to their first state."""
        rows = self._sequences(rows, alone=False)
        if rows:
            self._put(rows, self._fresh(len(rows)))

    def select(self, rows: Sequence[int]) -> None:
        """Let sequence i become what sequence rows[i] was; the stream then has len(rows) sequences."""
        state = self.state(rows)
        self._resize(len(rows))
        self._put(range(self.b), state)

    def _metadata(self, n: int) -> dict[str, str]:
        """Return the metadata of a snapshot of n sequences."""
        kind = 2 if not self.memory else 1 if len(self.memory) == len(self.states) else 3
        form = {"format": f"txl-deploy.state/{kind}", "model_id": self.bundle.manifest["model_id"]}
        return form if kind == 1 else {**form, "batch_size": str(n)}

    def save(self, rows: Sequence[int] | None = None) -> bytes:
        """Return a snapshot of some sequences, or all."""
        rows = self._sequences(rows, alone=False)
        return save({n: np.ascontiguousarray(v) for n, v in self.state(rows).items()}, self._metadata(len(rows)))

    def restore(self, snapshot: bytes, rows: Sequence[int] | None = None) -> None:
        """Give some sequences, or all, the state of a snapshot; a snapshot that does not fit changes nothing."""
        rows = self._sequences(rows, alone=False)
        state, header = load(snapshot), json.loads(snapshot[8 : 8 + int.from_bytes(snapshot[:8], "little")])
        fits = self._metadata(len(rows)).items() <= header.get("__metadata__", {}).items()
        need(fits, "The snapshot is of another model or number of sequences.")
        wanted, most = {}, 0
        if self.memory:
            state.setdefault("head", np.zeros(len(rows), np.int32))
            wanted = {"fill": (TYPES["int32"], [len(rows)]), "head": (TYPES["int32"], [len(rows)])}
            fill = state.get("fill", np.zeros(1))
            most = int(fill.max(initial=0))
            need(most <= self.M and (fill >= 0).all(), "The snapshot's fill is not within the memory.")
        for s in self.states:
            there, size = state.get(s["label"]), most
            if s["rows"] and there is not None and there.ndim == len(s["shape"]):
                size = int(np.clip(there.shape[s["row_axis"]], *s["rows"]))
            if there is not None or not s["absent"]:
                dtype = TYPES["float32" if s["memory"] else s["dtype"]]
                wanted[s["label"]] = dtype, self._form(s, len(rows), size)
        forms = {name: (value.dtype, list(value.shape)) for name, value in state.items()}
        wrong = sorted(name for name in {*wanted, *forms} if wanted.get(name) != forms.get(name))
        need(not wrong, f"The snapshot's tensors {wrong} are missing, unknown, or of another type or shape.")
        self._put(rows, state)

    def _checked(self, inputs: Arrays, counts: Counts) -> tuple[Arrays, int, Array]:
        """Check inputs; return them with zeros at positions that do not count, their length T, and the counts."""
        entries, b = self.bundle.given, self.b
        need(inputs.keys() == entries.keys(), f"The inputs are {list(entries)}, not {list(inputs)}.")
        length = next(
            (
                inputs[name].shape[row["shape"].index("L")] - row["lookahead"]
                for name, row in entries.items()
                if "L" in row["shape"]
            ),
            1,
        )
        ends = np.full(b, length) if counts is None else np.asarray(counts)
        need(ends.shape == (b,) and ((ends >= 0) & (ends <= length)).all(), f"The counts are not {b} of 0 ... T.")
        arrays = {}
        for name, row in entries.items():
            form = TYPES[row["dtype"]], tuple(self.bundle.shape(row, length, b))
            need((inputs[name].dtype, inputs[name].shape) == form, f"{name!r} is not of type and shape {form}.")
            array = arrays[name] = only_counted(row, inputs[name], ends)
            inside = row["role"] != "tokens" or ((array >= 0) & (array < row["vocab"])).all()
            need(inside, f"{name!r} has ids that are not 0 ... V - 1.")
        return arrays, length, ends

    def _allowed(self, length: int, counts: Array) -> None:
        """Refuse a segment that this bundle cannot run."""
        lengths = [p["segment_length"] for p in self.programs]
        fits = length in lengths if self.bundle.exact else 1 <= length <= lengths[-1]
        need(fits, f"There are no segments of {length} positions.")
        need(not self.bundle.exact or np.isin(counts, (0, length)).all(), "Each count has to be 0 or T.")
        need(not self.bundle.lockstep or counts.all() or not counts.any(), "In lockstep all sequences run, or none.")

    def _takes(self, program: Table) -> bool:
        """Return True if a program accepts the present states (§ 4, replace)."""
        listed = {t["name"]: t["shape"] for t in program["inputs"]}
        for s in self.states:
            sizes, there = listed.get(s["input"]), self.array.get(s["input"], np.zeros(0))
            if (sizes is None and there.size) or (sizes is not None and len(sizes) != there.ndim):
                return False
            if sizes is not None and any(size not in ("rows", n) for size, n in zip(sizes, there.shape, strict=False)):
                return False
        return True

    def run(self, inputs: Arrays, counts: Counts = None, commit: bool = True) -> Arrays:
        """Run a segment (§ 4): inputs by name, of T + lookahead positions, of which `counts` count (None: T).

        For example, {"ids": [2, 5]} with counts [5, 3].
        """
        arrays, length, checked = self._checked(inputs, counts)
        self._allowed(length, checked)
        return self._step(arrays, length, checked, commit)

    def _step(self, arrays: Arrays, length: int, counts: Array, commit: bool) -> Arrays:
        """Run a segment whose inputs and counts were checked."""
        bundle, B, kind = self.bundle, self.bundle.B, self.bundle.rules[self.rule]
        wanted = {name: row for name, row in bundle.outputs.items() if kind == "step" or name == bundle.logprobs}
        shapes = {name: bundle.shape(row, length, self.b) for name, row in wanted.items()}
        if not counts.any():
            return {name: np.zeros(shapes[name], TYPES[row["dtype"]]) for name, row in wanted.items()}
        fitting = (p for p in self.programs if p["segment_length"] >= length and self._takes(p))
        program = next((p for p in fitting if p["segment_length"] == length or not bundle.exact), None)
        if program is None:
            raise RefusedError("No program takes the states as they are.", "usage")
        feeds = {}
        for name, array in arrays.items():
            feeds[name] = np.zeros(bundle.shape(bundle.inputs[name], program["segment_length"], B), array.dtype)
            feeds[name][tuple(map(slice, array.shape))] = array
        beyond = {row["beyond"] for row in bundle.inputs.values() if row["role"] == "valid"}
        valid = np.full(B, counts.max() if "largest" in beyond else 0, np.int32)
        valid[: self.b] = counts
        roles = {"valid": valid, "fill": self.fill, "head": self.head}
        feeds |= {name: roles[row["role"]] for name, row in bundle.inputs.items() if row["role"] in roles}
        results = self._call(program, feeds | self.array)
        if kind == "hidden":
            hidden = results.pop(next(name for name in results if name not in {s["output"] for s in self.states}))
            rows = hidden[: self.b, :length].reshape(-1, hidden.shape[-1])
            results[bundle.logprobs] = bundle.softmax(rows).reshape(shapes[bundle.logprobs])
        if commit:
            self.array |= {s["input"]: results[s["output"]] for s in self.states if s["output"] in results}
            self._count(valid)
        cut = {name: results[name][tuple(map(slice, shape))] for name, shape in shapes.items()}
        return {name: only_counted(row, cut[name], counts) for name, row in wanted.items()}

    def _call(self, program: Table, feeds: Arrays) -> Arrays:
        """Run a graph; return its outputs except those that it wrote in place."""
        session = self.bundle.session(program)
        binding = session.io_binding()
        values = {t["name"]: ort.OrtValue.ortvalue_from_numpy(feeds[t["name"]]) for t in program["inputs"]}
        in_place = {s["output"]: values[s["input"]] for s in self.states if s["in_place"]}
        new = [t["name"] for t in program["outputs"] if t["name"] not in in_place]
        for name, value in values.items():  # on a CPU a value shares its array's memory
            binding.bind_ortvalue_input(name, value)
        for name, value in in_place.items():
            binding.bind_ortvalue_output(name, value)
        for name in new:
            binding.bind_output(name)
        session.run_with_iobinding(binding)
        return {name: value.numpy() for name, value in zip(new, binding.get_outputs()[len(in_place) :], strict=False)}

    def _count(self, valid: Array) -> None:
        """Advance the counters, and copy rows that a ring's step wrote beyond its slots to the first slots."""
        self.fill = np.minimum(self.fill + valid, self.most)
        self.head = self.head + valid if self.rule == "ring" else self.head
        for i in np.flatnonzero(self.head >= self.R):
            self.head[i] -= self.R
            for s in self.memory:
                rows = self._front(s)[i]
                rows[: self.head[i]] = rows[self.R : self.R + self.head[i]]

    def feed(self, inputs: Arrays, counts: Counts = None, last: bool = False) -> Arrays:
        """Run any number of positions, segment by segment (§ 5); `last` returns each sequence's last valid position.

        For example, {"ids": [2, 100]} in segments of 64 and 36.
        """
        arrays, total, ends = self._checked(inputs, counts)
        sizes, cuts, at = [p["segment_length"] for p in reversed(self.programs)], [], 0
        while at < ends.max():
            size = next((n for n in sizes if n <= total - at), 0) if self.bundle.exact else min(total - at, sizes[0])
            cuts.append((at, size, np.clip(ends - at, 0, size)))
            self._allowed(*cuts[-1][1:])
            at += size
        outputs = self._step(arrays, total, np.zeros_like(ends), False)  # zeros in the outputs' shapes
        long = {name for name, row in (self.bundle.inputs | self.bundle.outputs).items() if "L" in row["shape"]}
        for at, size, valid in cuts:
            to = {name: at + size + row["lookahead"] for name, row in self.bundle.given.items()}
            piece = {name: array[:, at : to[name]] if name in long else array for name, array in arrays.items()}
            for name, value in self._step(piece, size, valid, True).items():
                part = outputs[name][:, at : at + size] if name in long else outputs[name]
                part[valid > 0] = value[valid > 0]
        newest = np.arange(self.b), np.maximum(ends, 1) - 1
        return {name: value[newest] if last and name in long else value for name, value in outputs.items()}
