"""Record the calls of the stand-in for CUDA's driver as text, with a block's name in place of each address."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from txl_runtime import Model

MADE = {
    "cuStreamCreate": "queue",
    "cuEventCreate": "event",
    "cuStreamEndCapture": "graph",
    "cuGraphInstantiateWithFlags": "record",
}
"""Functions of the driver that create an object with a handle: the object's name in the text."""
Line = list[Any]
"""A call in pieces: texts, and places (block, offset), which `Notes.told` names when every block's use is known."""


class Notes:
    """The recorded calls of a stand-in for the driver.

    Attributes:
        driver: the stand-in.
    """

    def __init__(self) -> None:
        from stand_ins.driver import FakeDriver

        notes = self

        class Noting(FakeDriver):
            """The stand-in, which notes each call in order."""

            def call(self, name: str, work: Callable[..., None], arguments: list[Any]) -> int:
                status = super().call(name, work, arguments)
                notes.note(name, arguments, status)
                return status

            def launch(
                self, stream: int, work: Any, reads: Any = (), writes: Any = (), name: str = "run", *more: Any
            ) -> None:
                notes.launched(name, reads, writes)
                super().launch(stream, work, reads, writes, name, *more)

            def here(self, what: str, made_in: int | None = None) -> int:
                notes.lines.append(["engine: ", what])
                return super().here(what, made_in)

        self.lines: list[Line] = []
        self._blocks: list[Any] = []  # blocks of memory, in the order of their allocation
        self._uses: dict[Any, str] = {}
        self._things: dict[int, str] = {}
        self._numbers = Counter[str]()
        self._programs: dict[str, Any] = {}
        self._states: set[str] = set()
        self.driver = Noting()

    def know(self, model: Model) -> None:
        """Learn from a model's programs which tensors are states, inputs and results."""
        backend: Any = model.backend
        self._programs = {name: item.program for name, item in backend.executables.items()}
        self._states = {
            name for state in model.manifest.states_of(model.update) for name in (state.input, state.output)
        }

    def taken(self) -> list[Line]:
        """Return the calls that were made since this method was last called."""
        result, self.lines = self.lines, []
        return result

    def told(self, lines: Sequence[Line]) -> list[str]:
        """Return calls as text, one line each; blocks are named by use and number, e.g. "states 1 + 512"."""
        names, numbers = {}, Counter[str]()
        for block in self._blocks:
            use = self._uses.get(block, "aside" if block.kind == "device" else "unused")
            names[block], numbers[use] = f"{use} {numbers[use]}", numbers[use] + 1
        return [
            "".join(piece if isinstance(piece, str) else f"{names[piece[0]]} + {piece[1]}" for piece in line)
            for line in lines
        ]

    def called(self, use: str, address: int) -> None:
        """Store the use, e.g. "inputs", of the block that contains an address, if the block has none yet."""
        result = self._around(address)
        if result is not None:
            self._uses.setdefault(result, use)

    def launched(self, name: str, reads: Any, writes: Any) -> None:
        """Note a run of an engine, with the name, size and place of each tensor that it reads and writes."""
        program = self._programs[name.removeprefix("run ")]
        line: Line = [name]
        for specs, ranges, use in ((program.inputs, reads, "inputs"), (program.outputs, writes, "results")):
            for spec, (address, size) in zip(specs, ranges, strict=True):
                self.called("states" if spec.name in self._states else use, address)
                line += [f", {spec.name} ({size}) at ", self._place(address)]
        self.lines.append(line)

    def note(self, name: str, arguments: Sequence[Any], status: int) -> None:
        """Note a call of the driver, with its arguments and, if it failed, its status."""
        if name == "cuMemcpy2DAsync_v2":
            line = self._rows(*arguments)
        else:
            line = [f"{name}("]
            for index, value in enumerate(arguments):
                line += [", " if index else "", self._text_of(name, index, value, status)]
        self.lines.append([*line, ")", f" fails with {status}" if status else ""])

    def _rows(self, inputs: Any, stream: int) -> Line:
        """Return the pieces of a copy of several rows, which CUDA describes in a struct."""
        from stand_ins.driver_statuses import HOST, MemoryCopy

        asked = MemoryCopy.from_buffer_copy(inputs._obj)
        line: Line = ["cuMemcpy2DAsync_v2("]
        for side, use in (("to", "arrived"), ("source", "staged")):
            kind = "host" if getattr(asked, f"{side}_type") == HOST else "device"
            place = self._copied(use, getattr(asked, f"{side}_{kind}") or 0)
            line += [f"{side} ", place, f" by {getattr(asked, f'{side}_pitch')}, "]
        return [*line, f"{asked.width} wide, {asked.height} rows, ", self._things[stream]]

    def _text_of(self, name: str, index: int, value: Any, status: int) -> Any:
        """Return an argument of a call as text or as a place (block, offset)."""
        result = None if status else getattr(getattr(value, "_obj", None), "value", None)
        if result and name in MADE:
            self._things[result] = f"{MADE[name]} {self._numbers[name]}"
            self._numbers[name] += 1
            return self._things[result]
        if result and name in ("cuMemAlloc_v2", "cuMemHostAlloc"):
            self._blocks.append(self._around(result))
            return self._place(result)
        if not isinstance(value, int):
            return "…"
        if value in self._things:
            return self._things[value]
        if value > 2**20 and not name.startswith("cuCtx"):  # an address: all sizes here are smaller than 2**20
            use = "arrived" if index == 0 else "staged"
            return self._copied(use, value) if name.startswith("cuMemcpy") else self._place(value)
        return str(value)

    def _copied(self, use: str, address: int) -> Any:
        """Return the place that a copy reads or writes; page-locked memory of the host gets the use of the copy."""
        result = self._around(address)
        if result is not None and result.kind == "pinned":
            self._uses.setdefault(result, use)
        return self._place(address)

    def _place(self, address: int) -> Any:
        result = self._around(address)
        return "host" if result is None else (result, address - result.address)

    def _around(self, address: int) -> Any:
        """Return the block that contains an address, or that ends there, as for a tensor without values at its end."""
        memory = self.driver.memory
        return memory.around(address) or memory.around(address - 1)
