"""Write the README.md of a package, which says how to start, use and monitor the server."""

from __future__ import annotations

from txl_runtime.bundle.axes import Axes
from txl_runtime.bundle.manifest import Manifest

from txl_deploy.triton.inside import tables
from txl_deploy.triton.inside.model import PACKAGES

PYTHON = """# {name} on Triton's Python backend

Made by `txl-deploy package --target triton`. Copy or mount this folder as it is; rename a model by renaming its folder.

## Start

The server's Python needs a NumPy that the server was made for (`numpy<2` for servers of 2024), `onnxruntime`, `msgspec`
and `safetensors`; the bundle and the runtime are in here. Where they cannot be installed, put them into a folder:

    python3 -m pip install --target site 'numpy<2' onnxruntime msgspec safetensors
    export {packages}=$PWD/site

    tritonserver --model-repository=.

What is missing, or does not fit, stands in the server's log in one line. `parameters` in `config.pbtxt` say which of
the runtime's backends runs (`backend`) and how many threads it has (`threads`).

## Ask: `{name}`

One request is the next positions of one sequence; its correlation id (`sequence_id`, a number or a text) names it.
START (`sequence_start`) with the first request, also to begin again; END (`sequence_end`) with the last.

{tensors}

Ask only for the outputs you need. {batching}

At most {sequences} sequences are at once ({state_bytes} bytes of memory each at most); the first request of another one
waits until one ends. A sequence that sends nothing for {idle:g} s is forgotten, and its next request is refused: start
it again with what its memory should hold.

While a request runs, the others of this model wait: send a long text in parts of some hundred positions. For more
cores, raise `count` in `instance_group`: so many processes run, each with places and memory of its own.

## Watch

    curl -sf --max-time 5 localhost:8000/v2/models/{name}/infer -d @{name}/probe.json

`/v2/health/ready` goes on saying 200 when the process of a model has died; only an inference tells. The probe takes a
place of its own for a moment, so it waits while all are taken.
"""
"""The README of a package, with fields in braces."""
GENERATE = """
## Ask: `{name}-generate`

One request with `tokens` (the prompt) and `max_new_tokens`, optionally `temperature` (0 is greedy), `top_k`, `top_p`,
`seed` and `stop_tokens`; one response for each token, with `tokens`, `logprobs` and `finish_reason`, which is empty
until the last. With a correlation id the memory stays for the next request of that id (START empties it before, END
after), unless nobody uses it for {idle:g} s; without one it ends with the request. What still runs under an id when
START comes ends there, with finish_reason `closed`. Without `tokens` a memory goes on from the token drawn last; a new
one begins with the bundle's boundary token, where it has one. This model and `{name}` do not share their sequences.

    curl -sN localhost:8000/v2/models/{name}-generate/generate_stream -d '{{"tokens": [1, 2, 3], "max_new_tokens": 5}}'
"""
"""Section of the README for a package that also generates."""


def page(models: tuple[str, ...], manifest: Manifest, sequences: int, idle_seconds: float) -> str:
    """Return the README of a package."""
    name = models[0]
    rows = [f"| `{entry.name}` | in | {_shape(entry.axes)} {entry.dtype} |" for entry in manifest.given]
    rows += [f"| `{entry.name}` | out | {_shape(entry.axes)} {entry.dtype} |" for entry in manifest.outputs]
    if tables.speaks(manifest):
        rows += [
            f"| `{tables.LAST}` | out | [1, {manifest.vocab_size}] float32: log-probabilities after the last token |",
            f"| `{tables.NEXT}` | out | [1, 1] int32: the best token there |",
        ]
    batching = "Sequences run together where their requests meet." if tables.together(manifest) else ""
    text = PYTHON.format(
        name=name,
        packages=PACKAGES,
        tensors="\n".join(["| tensor | | shape |", "|---|---|---|", *rows]),
        batching=batching,
        sequences=sequences,
        state_bytes=manifest.state_bytes,
        idle=idle_seconds,
    )
    return text + (GENERATE.format(name=name, idle=idle_seconds) if len(models) > 1 else "")


def _shape(axes: Axes) -> str:
    sizes = map(str, axes.alone.filled("", "T"))
    return f"[{', '.join(['1', *(list(sizes) or ['1'])])}]"
