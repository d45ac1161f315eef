"""Parses graphs, and builds and examines engines, with TensorRT 10.x, 11.x and TensorRT-RTX.

Besides this module only `txl_runtime.device.engines.library` and `running` touch the libraries' objects; `library` says
how. Two more rules hold here: a network must outlive its parser, and an exception in a callback is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from txl_runtime.bundle.bindings import Binding
from txl_runtime.device.engines.library import DTYPES, Library
from txl_runtime.errors import BackendError


class NodeError(NamedTuple):
    """One error of the parser.

    `node` is the node's index in the graph, or -1 if the parser does not give it. `function` is the parser's own
    function that complained: "importScatterElements" reads the nodes of that operator.
    """

    node: int
    text: str
    function: str = ""


@dataclass(frozen=True)
class Network:
    """A parsed graph or the parser's errors, with the objects that must stay alive as long as the network."""

    builder: Any
    network: Any
    errors: tuple[NodeError, ...]
    inputs: tuple[Binding, ...] = ()
    outputs: tuple[Binding, ...] = ()
    layer_types: tuple[str, ...] = ()


@dataclass(frozen=True)
class Examined:
    """The result of checking an engine's bytes.

    Attributes:
        verified: the checks that the engine passed, for the sidecar.
        problem: the reason why the engine cannot be used; "" if this machine finds none.
        layers: the library's listing of the engine's layers; "" if the engine could not be loaded.
        inputs, outputs: the engine's bindings; empty if the engine could not be loaded.
    """

    verified: tuple[str, ...] = ()
    problem: str = ""
    layers: str = ""
    inputs: tuple[Binding, ...] = ()
    outputs: tuple[Binding, ...] = ()


class Compiler:
    """Parses graphs, and builds and examines engines, with one library."""

    def __init__(self, library: Library) -> None:
        self.library = library

    def parse(self, data: bytes, path: str) -> Network:
        """Parse a graph; its external weights are in the folder of `path`."""
        trt, library = self.library.module, self.library
        builder = self._builder()
        network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        parser = trt.OnnxParser(network, library.logger)
        if not parser.parse(data, path):
            errors = [parser.get_error(i) for i in range(parser.num_errors)]
            node_errors = tuple(NodeError(int(error.node()), str(error.desc()), str(error.func())) for error in errors)
            return Network(builder, network, node_errors)
        layers = [network.get_layer(i) for i in range(network.num_layers)]
        if library.facts.reads_in_place:
            _give_attention_its_keys(trt, layers)
        return Network(
            builder,
            network,
            errors=(),
            inputs=tuple(_binding(network.get_input(i)) for i in range(network.num_inputs)),
            outputs=tuple(_binding(network.get_output(i)) for i in range(network.num_outputs)),
            layer_types=tuple(_enum_name(layer.type) for layer in layers),
        )

    def build(self, parsed: Network, gpus: Sequence[int], on_step: Callable[[], None]) -> Any:
        """Build the engine; return its bytes as an object with the buffer protocol, None if the builder failed.

        Args:
            gpus: compute capabilities, e.g. (86, 89), if the library takes a list; empty for its default.
        """
        trt, library = self.library.module, self.library
        builder, network = parsed.builder, parsed.network
        config = builder.create_builder_config()
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
        config.clear_flag(trt.BuilderFlag.TF32)  # TF32 is on by default, and leaves fp32 products 10 bits of fraction
        if library.facts.portable:  # else the engine may allocate while it runs, which a CUDA graph cannot record
            config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)
        if library.facts.portable and gpus:
            known = trt.ComputeCapability.__members__
            config.num_compute_capabilities = len(gpus)
            for index, gpu in enumerate(gpus):
                if not config.set_compute_capability(known[f"SM{gpu}"], index):
                    raise BackendError(f"{library.title} refused SM {gpu}, expected it to build for it; leave it out")
        observer = _observer(trt, on_step)
        config.progress_monitor = observer
        return builder.build_serialized_network(network, config)

    def examine(self, engine_bytes: Any) -> Examined:
        """Check an engine's bytes as far as this machine can: their header, and loading them if there is a GPU."""
        trt, library = self.library.module, self.library
        runtime = trt.Runtime(library.logger)
        problems = library.header_problems(runtime, engine_bytes)
        if problems is not None and "MALFORMED_ENGINE" in problems:
            return Examined(problem="its header is not an engine's (MALFORMED_ENGINE)")
        if problems is not None:
            # The engine is for a different GPU or driver, or this machine has no driver: no fault of the engine.
            reason = ", ".join(problems) or "no usable CUDA driver"
            return Examined(verified=(f"header (not loaded here: {reason})",))
        engine = runtime.deserialize_cuda_engine(memoryview(engine_bytes))
        if engine is None:
            return Examined(problem="it cannot be loaded on the GPU it was built for")
        inputs, outputs = library.bindings(engine)
        inspector = engine.create_engine_inspector()
        layers = inspector.get_engine_information(trt.LayerInformationFormat.ONELINE)
        return Examined(
            verified=("header", "loaded") if library.facts.portable else ("loaded",),
            layers=str(layers),
            inputs=tuple(inputs),
            outputs=tuple(outputs),
        )

    def _builder(self) -> Any:
        trt, library = self.library.module, self.library
        try:
            builder = trt.Builder(library.logger)
        except TypeError:  # raised by the Python bindings if the library returns no builder
            builder = None
        if builder is None:
            raise BackendError(
                f"{library.title} cannot start: it found no usable CUDA driver, expected an NVIDIA GPU and its driver; "
                "build on the machine that will run the engine (TensorRT-RTX needs none: --target rtx)"
            )
        return builder


def _give_attention_its_keys(trt: Any, layers: Sequence[Any]) -> None:
    """Remove the products with 1 that the parser puts before the queries and keys of an attention of scale 1.

    The compiler would drop the product, but still copy the keys. Also let attentions without a kernel become several
    layers, which the library forbids by default.
    """
    attentions = [layer for layer in layers if layer.type == trt.LayerType.ATTENTION_INPUT]
    if not attentions:
        return
    layers_by_name = {}
    for layer in layers:
        for index in range(layer.num_outputs):
            tensor = layer.get_output(index)
            layers_by_name[tensor.name] = layer
    for boundary in attentions:
        for index in (0, 1):
            tensor = boundary.get_input(index)
            factor = _times_one(trt, layers_by_name, layers_by_name.get(tensor.name))
            if factor is not None:
                boundary.set_input(index, factor)
        boundary.__class__ = trt.IAttentionInputLayer  # the bindings return every layer as the base class
        attention = boundary.attention
        attention.decomposable = True


def _times_one(trt: Any, layers_by_name: Mapping[str, Any], product: Any) -> Any:
    """Return the tensor that a layer multiplies by a constant 1 (maybe cast); None if the layer does something else."""
    if product is None or product.type != trt.LayerType.ELEMENTWISE:
        return None
    product.__class__ = trt.IElementWiseLayer
    tensor = product.get_input(1)
    constant = layers_by_name.get(tensor.name)
    if constant is not None and constant.type == trt.LayerType.CAST:
        tensor = constant.get_input(0)
        constant = layers_by_name.get(tensor.name)
    if product.op != trt.ElementWiseOperation.PROD or constant is None or constant.type != trt.LayerType.CONSTANT:
        return None
    constant.__class__ = trt.IConstantLayer
    return product.get_input(0) if np.all(np.asarray(constant.weights) == 1) else None


def _observer(trt: Any, on_step: Callable[[], None]) -> Any:
    class Observer(trt.IProgressMonitor):  # type: ignore[misc, name-defined, unused-ignore]
        """Counts steps. The totals that the library announces are not used, because it does not keep to them."""

        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)

        def phase_start(self, name: str, parent: str | None, steps: int) -> None:
            """Do nothing, because only finished steps are counted."""

        def step_complete(self, name: str, step: int) -> bool:
            on_step()
            return True

        def phase_finish(self, name: str) -> None:
            """Do nothing, because only finished steps are counted."""

    return Observer()


def _enum_name(value: Any) -> str:
    return str(value.name)


def _binding(tensor: Any) -> Binding:
    kind = _enum_name(tensor.dtype)
    return Binding(str(tensor.name), DTYPES.get(kind, kind), tuple(int(size) for size in tensor.shape))
