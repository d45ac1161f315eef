"""An application without torch that continues a text with a bundle, and remembers the texts of earlier runs.

    python samples/embed.py demo/model.txl "def main(" --state memory.safetensors

It restores the memory of earlier runs, reads the text, prints a continuation while it is drawn, and saves the memory.
It needs numpy, msgspec, safetensors and onnxruntime: `pip install '.[cpu]'` in a checkout of this project.
"""

from __future__ import annotations

import argparse
import io
import sys
from pathlib import Path

import txl_runtime


def main() -> int:
    """Continue the text of the command line; return the exit code."""
    parser = argparse.ArgumentParser(description="Continue a text with a bundle, remembering earlier runs.")
    parser.add_argument("bundle")
    parser.add_argument("text")
    parser.add_argument("--tokens", type=int, default=200, help="how many to draw (default: %(default)s)")
    parser.add_argument("--state", type=Path, help="file to keep the memory in")
    arguments = parser.parse_args()
    try:
        model = txl_runtime.load(arguments.bundle)
        stream = model.stream(1)
        if arguments.state and arguments.state.exists():
            stream.restore(txl_runtime.StreamState.load(arguments.state))
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # a model may write characters that this terminal's encoding lacks
        drawn = stream.generate(arguments.text, arguments.tokens, temperature=0.7, top_p=0.95, feed_last=True)
        for (text,) in drawn.texts():
            print(text, end="", flush=True)
        print(f"\n[memory: {stream.fill[0]} of {model.memory_length} rows per layer]", file=sys.stderr)
        if arguments.state:
            stream.snapshot().save(arguments.state)
    except BrokenPipeError:
        sys.stderr.close()  # the program that read the output has closed it
        return 141
    except txl_runtime.TxlError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
