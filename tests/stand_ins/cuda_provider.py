"""Runs the programs of bundles with ONNX Runtime's real CUDA provider, over the libraries of `cuda_libraries.c`.

    python -m stand_ins.cuda_provider LIBCUDA COUNTING BUNDLE:RULE...

It opens each bundle as the runtime does, from whichever folders Python imports from; only the driver is the stand-in.
Prints JSON: for each bundle and rule and each program the bytes of memory that it updates in place, which tensors are
not on the device, which nodes are not, and what was called of the libraries while it was tied to memory, in its first
run and in its third.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

from txl_runtime.bundle.reading import open_bundle
from txl_runtime.bundle.tables import tensor_bytes
from txl_runtime.device import cuda, onnxruntime_cuda
from txl_runtime.device.driver import Driver

from stand_ins.driver import FakeDriver


def main() -> None:
    """Print what was found."""
    libcuda, counting, *asked = sys.argv[1:]
    ctypes.CDLL(libcuda)  # the driver is found by its name, wherever it is
    found = {}
    for each in asked:
        path, _, rule = each.rpartition(":")
        device = cuda.Device(Driver(FakeDriver(eager=True, unified=True)))
        onnxruntime_cuda.open_cuda = lambda device=device: device
        backend = onnxruntime_cuda.open_onnxruntime_cuda(open_bundle(Path(path)), rule)
        library = ctypes.CDLL(counting)
        library.told.restype = ctypes.c_char_p
        found[each] = {name: seen(executable, backend, library) for name, executable in backend.executables.items()}
    print(json.dumps(found))


def seen(executable: Any, backend: Any, library: Any) -> dict[str, Any]:
    """One program."""

    def calls() -> dict[str, int]:
        lines = library.told().decode().splitlines()
        return {name: int(count) for name, count in (line.split("=") for line in lines)}

    def memory() -> dict[str, Any]:
        made = {spec.name: backend.device.allocate(tensor_bytes(spec)) for spec in (*program.inputs, *program.outputs)}
        return made | {output: made[given] for output, given in executable.in_place.items()}

    def tied(blocks: dict[str, Any]) -> Any:
        return executable.prepare({name: block.address for name, block in blocks.items()}, backend.queue)

    def run(launch: Any) -> dict[str, int]:
        calls()
        launch()
        return calls()

    session, program = executable._session, executable.program
    sides = (
        (session.get_inputs(), session.get_input_memory_infos()),
        (session.get_outputs(), session.get_output_memory_infos()),
    )
    places = {item.name: info.name for items, infos in sides for item, info in zip(items, infos, strict=True)}
    blocks = memory()
    with backend.device.current():
        calls()
        launch = tied(blocks)
        bound, runs = calls(), [run(launch) for _ in range(3)]
    parts = session.get_provider_graph_assignment_info()
    nodes = [node.op_type for part in parts if part.ep_name != "CUDAExecutionProvider" for node in part.get_nodes()]
    off = {name: place for name, place in places.items() if place != "Cuda"}
    size = sum(tensor_bytes(spec) for spec in program.outputs if spec.name in executable.in_place)
    return {"memory": size, "off": off, "nodes": nodes, "bound": bound, "first": runs[0], "again": runs[2]}


if __name__ == "__main__":
    main()
