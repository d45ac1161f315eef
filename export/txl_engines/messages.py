"""Turns the libraries' error messages into sentences that advise a user."""

from __future__ import annotations

import re
from collections.abc import Sequence

from txl_engines.checking import Graph
from txl_engines.compiler import NodeError

LONGEST = 400
"""Maximum number of characters of a library's message that are shown."""

KNOWN: tuple[tuple[str, str], ...] = (
    (
        r"same input types|identical types|types? (?:mismatch|must match)|must have the same type",
        "expected one type for both; export the model again, or cast one of the two in the graph",
    ),
    (
        r"but must match|dimensions? (?:mismatch|must)|incompatible dimensions",
        "expected shapes that fit each other; export the model again",
    ),
    (
        r"Plugin not found|No (?:importer|op) registered|not supported by (?:the )?parser",
        "expected operators that this library knows; use a newer one",
    ),
    (
        r"Failed to import initializer|Failed to open file|out of range.*file size",
        "expected the weight file beside the graph, complete; copy the bundle again",
    ),
    (r"MODEL_DESERIALIZE_FAILED|Failed to parse (?:the )?ONNX model", "expected an ONNX graph; export the model again"),
    (
        r"graph_jit\.cpp.*CUDA_SUCCESS",
        "expected a CUDA driver: engines whose weights are stripped or can be refitted cannot be built without one; "
        "build on a machine with an NVIDIA GPU, or with the weights inside",
    ),
    (
        r"HW-specific datatype",
        "expected a type that every GPU of the list has: SM 75 has no bf16; leave it out of --sm, or export fp16",
    ),
    (
        r"not supported by a dedicated kernel|setDecomposable",
        "expected attention as products and a softmax, which this exporter writes; export the model again",
    ),
    (r"no optimization profile has been defined", "expected fixed shapes; export the model again"),
    (r"must have at least one output", "expected a graph with outputs; export the model again"),
    (
        r"out of memory|OutOfMemory|bad_alloc|[Cc]annot allocate|insufficient memory",
        "expected more memory: close other programs, add swap, or build a bundle of smaller B, M or L",
    ),
    (
        r"could not find any implementation",
        "expected a kernel for the node on this GPU: give the builder more memory, or use a newer TensorRT",
    ),
    (r"libnvinfer\w*\.so|builder_resource", "expected the whole library; install it again, all parts of one version"),
    (r"must be a network output", "expected the updated memory as an output; export the model again"),
    (
        r"plugin registry|Unsupported (?:reduction|attribute|node)|^not supported$",
        "expected operators that this library has; write the step with others, or run it with --backend cpu",
    ),
    # This pattern is last, because without a driver this message accompanies every other message.
    (
        r"cudaError 35|CUDA initialization failure|CUDA driver version is insufficient",
        "expected an NVIDIA GPU and its driver; build on the machine that will run the engine",
    ),
)
"""Pairs of a message's pattern and the advice: what was expected, and what to do. The first match counts."""

UNKNOWN = "expected it to build; see the troubleshooting table in docs/engines.md, and report it if it is not there"


def explain_parse(errors: Sequence[NodeError], graph: Graph, title: str) -> str:
    """Explain a parser's first error: the fault, the node, and what to do."""
    if not errors:
        return f"{graph.path}: {title} cannot read it and does not say why; {UNKNOWN}"
    error = errors[0]
    text = _plain(error.text)
    if text == "false":  # the parser gives only the failed condition, without a message
        text = "not supported"
    where, operator = "", re.sub("^(?:import|check)", "", error.function)
    if 0 <= error.node < len(graph.nodes):
        name, kind = graph.nodes[error.node]
        where = f"node {error.node} {name!r} ({kind}): "
    elif operator in {kind for _, kind in graph.nodes}:
        where = f"a node of operator {operator}: "
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    return f"{graph.path}: {where}{text}{more}; {_telling([text])[1]}"


def explain_build(said: str, graph: Graph, title: str) -> str:
    """Explain why a builder returned no engine, from everything that it logged."""
    lines = [line for line in said.splitlines() if line.strip()]
    if not lines:
        return f"{graph.path}: {title} built nothing and does not say why; {UNKNOWN}"
    telling, advice = _telling(lines)
    if advice is UNKNOWN and len(lines) > 1:  # after a crash the last line names the cause
        telling = f"{telling}: {lines[-1].strip()}"
    named = next((name for name, _ in graph.nodes if name and re.search(rf"\b{re.escape(name)}\b", telling)), None)
    where = f"node {named!r}: " if named else ""
    return f"{graph.path}: {title} cannot build it: {where}{_plain(telling)}; {advice}"


def _telling(lines: Sequence[str]) -> tuple[str, str]:
    """Return the most informative line and its advice: the last line often says only that nothing was built."""
    for pattern, advice in KNOWN:
        for line in lines:
            if re.search(pattern, line):
                return line, advice
    return lines[0], UNKNOWN


NOISE = (
    r"\s*\[checkMacros\S+\] Error Code 1: Cuda Runtime \([^()]*\(cudaError 35[^)]*\)\)",  # the machine has no driver
    r"\s*\[checkMacros\S+\] Error Code 1: Cuda Runtime \(cudaError 35[^)]*\)",
    r"\s*\(?In \w[\w:]* at \S+?:\d+\)?",  # file and line in the library's sources
    r"\[\w+\.\w+:\d+: \w+\]\s*",
    r"^Invalid Node - \S+\s+",
    r"^\w+ && ",
)
"""Patterns of those parts of messages that do not help users."""


def _plain(text: str) -> str:
    """Reduce a message to one line, without noise and without the library's internal function names around it."""
    line = " ".join(text.split())
    cleared = line
    for pattern in NOISE:
        cleared = re.sub(pattern, "", cleared).strip()
    inner = re.search(r"Error Code \d+: [\w ]+ \((?P<said>.+?)\)?$", cleared)
    line = (inner["said"] if inner else cleared).strip(" .") or line
    return line if len(line) <= LONGEST else line[:LONGEST] + " …"
