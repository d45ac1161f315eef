"""A chat in the terminal: the model continues every line, and remembers the whole conversation.

    python samples/chat.py demo/model.txl --stop "def "

`/save FILE` and `/load FILE` keep the memory in a file. Ctrl-C ends a reply; at the prompt it ends the program.
"""

from __future__ import annotations

import argparse
import io
import signal
import sys

import txl_runtime


def reply(stream: txl_runtime.Stream, line: str, options: argparse.Namespace) -> None:
    """Print a continuation of a line; afterwards the memory holds the line and every drawn token."""
    asked: list[int] = []  # Ctrl-C is noted and obeyed between tokens: inside a step it could lose a token
    before = signal.signal(signal.SIGINT, lambda number, _: asked.append(number))
    try:
        drawn = stream.generate(
            f"{line}\n", options.tokens, options.temperature, stop_texts=options.stop, logprobs=True, feed_last=True
        )
        count, total = 0, 0.0
        for (text,) in drawn.texts():
            assert drawn.logprobs is not None
            count, total = count + 1, total + float(drawn.logprobs[0])
            print(text, end="", flush=True)
            if asked:
                break
        print(*drawn.finish())  # prints the held-back end of a reply that ended early
        print(f"[{count} tokens, mean log-probability {total / max(count, 1):.3f}]", file=sys.stderr)
    finally:
        signal.signal(signal.SIGINT, before)


def obey(stream: txl_runtime.Stream, line: str, options: argparse.Namespace) -> None:
    """Run a line such as `/save FILE`, or reply to a line without a command; print the reason if this fails."""
    command, _, path = line.partition(" ")
    try:
        if command == "/save":
            stream.snapshot().save(path)
        elif command == "/load":
            stream.restore(txl_runtime.StreamState.load(path))
        else:
            reply(stream, line, options)
    except txl_runtime.TxlError as error:
        print(f"error: {error}", file=sys.stderr)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Chat with a bundle that has a vocabulary.")
    parser.add_argument("bundle")
    parser.add_argument("--tokens", type=int, default=200, help="of a reply at most (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.7, help="0 for the most probable (default: %(default)s)")
    parser.add_argument("--stop", action="append", default=[], help="text that ends a reply; may be given repeatedly")
    options = parser.parse_args()
    # the user may type, and the model may draw, bytes that are no text
    for file, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "replace")):
        if isinstance(file, io.TextIOWrapper):
            file.reconfigure(errors=errors)
    try:
        stream = txl_runtime.load(options.bundle).stream(1)
        while True:
            obey(stream, input("> "), options)
    except (EOFError, KeyboardInterrupt):
        print()
    except txl_runtime.TxlError as error:
        parser.exit(error.exit_code, f"error: {error}\n")
