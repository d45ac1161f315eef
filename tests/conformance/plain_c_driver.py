"""Lets the runner of the conformance list drive packages in plain C: each bundle is packaged, compiled and called.

    python conformance/run.py --driver "python tests/conformance/plain_c_driver.py" --folder FOLDER

A package has a step, a reset and a struct that may be copied. So it keeps the promises below and no other: it draws and
scores nothing, knows no text, takes no sequence out, moves none, limits no memory and reads no snapshots of Python's.
Memory is rolled, so vectors that ask for a ring are tried where FOLDER has "rolled" in its place. States do not grow,
and C99 has no half precision. A package's own test replays steps of its own B and L, not always the bundle's vectors.

What a caller does, cutting a text into segments, the runtime's code does here. Where a model takes whole segments
alone, there is a package for each length, and the struct goes from one to the other.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "compare"))
import txl_runtime
from plain_function import PlainFunction
from txl_runtime.errors import BackendError, BundleError, CheckError, UsageError
from txl_runtime.streaming.feeding import feed_arrays
from txl_runtime.streaming.inputs import Segments, check_segment
from txl_runtime.types import Array, Arrays, Ids

from conformance.driver import Driver, Json, _arrays, _named, _Unsupported, main, packed
from txl_deploy.plain_c.package import package_c
from txl_deploy.plain_c.step import whole_update

SUPPORTS = [
    *("padding", "idle", "cut", "last", "fill", "initial", "reset", "commit", "lookahead", "lockstep", "open"),
    *("clusters", "axes", "int8", "half", "old"),
]
CANNOT = ["selftest", "score", "generate", "select", "save", "restore", "take", "put", "encode", "decode"]


class PlainDriver(Driver):
    """Python's driver with a package in plain C in place of the runtime's stream."""

    _functions: dict[int, PlainFunction]
    _function: PlainFunction | None = None
    _b = 0

    def __init__(self) -> None:
        super().__init__()
        self._place = tempfile.TemporaryDirectory()

    def answer(self, request: object) -> Json:
        """See `Driver`."""
        if isinstance(request, dict) and request.get("do") in CANNOT:
            return {"refused": f"a package in plain C cannot {request['do']}", "kind": "unsupported"}
        return super().answer(request)

    @property
    def function(self) -> PlainFunction:
        """The package that was loaded last."""
        if self._function is None:
            raise UsageError("no stream is open, expected open before anything that has a state")
        return self._function

    def _do_hello(self, request: Json) -> Json:
        return {"name": "plain C", "version": "1", "engine": "none", "supports": SUPPORTS}

    def _do_load(self, request: Json) -> Json:
        self._model, self._function = txl_runtime.load(request["path"], "cpu", threads=1), None
        manifest, folder = self.model.manifest, Path(tempfile.mkdtemp(dir=self._place.name))
        try:
            if request["update"] not in (None, update := whole_update(manifest)):
                raise _Unsupported(f"update is {request['update']}, this package has {update}")
            is_open = all(program.open_batch for program in manifest.programs if program.update == update)
            batch_size = manifest.batch_size if is_open else None
            lengths = [()] if manifest.can.run_ragged else [(length,) for length in sorted(manifest.segment_lengths)]
            made = [
                package_c(Path(request["path"]), folder / f"{number}", True, "model", one, batch_size)
                for number, one in enumerate(lengths)
            ]
        except (UsageError, BackendError) as error:
            raise _Unsupported(str(error)) from None
        except CheckError as error:  # a bundle that contradicts itself
            raise BundleError(str(error)) from None
        functions = [PlainFunction(each.folder, manifest, each.folder) for each in made]
        self._functions = {function.length: function for function in functions}
        self._function = functions[-1]
        return {"update": update}

    def _do_open(self, request: Json) -> Json:
        if request["memory_length"] is not None:
            raise _Unsupported("memory_length is given, and a package keeps all rows of its memory")
        self._b = request["b"]
        self.function.reset()
        return {}

    def _do_run(self, request: Json) -> Json:
        manifest = self.model.manifest
        arrays, counts, columns, _ = Segments(manifest).check(_arrays(request["inputs"]), request["counts"], self._b)
        check_segment(columns, counts, manifest, "inputs")
        return _named(self._run(arrays, counts, request["commit"]))

    def _do_feed(self, request: Json) -> Json:
        manifest = self.model.manifest
        found = Segments(manifest).check(_arrays(request["inputs"]), request["counts"], self._b)
        return _named(feed_arrays(found, manifest, self._b, self._run, request["last"]))

    def _run(self, arrays: Arrays, counts: Ids, commit: bool = True) -> dict[str, Array]:
        columns = max(entry.axes.length(arrays[entry.name]) for entry in self.model.manifest.given)
        before, after = self.function, self._functions.get(columns, self.function)
        if after is not before:
            after.adopt(before)
            self._function = after
        return after.run(arrays, counts, commit)

    def _do_reset(self, request: Json) -> Json:
        which = np.zeros(self.function.batch_size, np.bool_)
        which[slice(None) if request["rows"] is None else request["rows"]] = True
        self.function.reset(which)
        return {}

    def _do_state(self, request: Json) -> Json:
        axes = {state.name: state.axes for state in self.model.manifest.states_of(whole_update(self.model.manifest))}
        states = {name: packed(array[axes[name].at(slice(self._b))]) for name, array in self.function.states().items()}
        return {"states": states, "fill": self.function.fill()[: self._b].tolist()}


if __name__ == "__main__":
    main(PlainDriver())
