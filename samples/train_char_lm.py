"""Train a small byte-level Transformer-XL on the Python standard library's own sources.

    python samples/train_char_lm.py --out DIR [--minutes 4] [--seed 0] [--force]

Nothing is downloaded: the text is the ``*.py`` files that came with the interpreter, and files chosen by a hash of
their name are held out. The folder receives ``model.pt`` (a txl-deploy checkpoint: a plain dictionary that
``torch.load(weights_only=True)`` opens), ``heldout.txt`` (the bytes the model never saw) and ``vocabulary.json``.

The model is the Transformer-XL of Dai et al. 2019 (arXiv 1901.02860). Shapes below use B streams, L bytes in a
segment, m remembered rows, K = m + L rows to attend to, D = d_model, H heads of d_head, V = 256 byte values.

A run bounded by ``--minutes`` is not reproducible bit for bit: how many steps fit, and so where each step falls in the
learning rate's schedule, depends on the machine's speed and load. ``--steps N`` fixes both: the same flags on the same
kind of processor, with the same versions of Python and torch, then give the same model.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import math
import platform
import signal
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from torch import Tensor, nn
from torch.nn import functional

# A function called after every step with: finished share of the run, steps, smoothed bits per byte, bytes per second.
Report = Callable[[float, int, float, float], None]

VOCABULARY = 256
EVALUATION_SEGMENT = 64  # one length for every evaluation, so that only the memory differs between them
EVALUATION_STREAMS = 16  # number of parallel streams of the evaluated text, only for speed
RESTART = 32  # training segments after which the streams start again from an empty memory
FILES = ("model.pt", "heldout.txt", "vocabulary.json")
# Folders of installed packages, test data and generated tables: their text does not read like the library's.
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data"}


def native_bfloat16() -> bool:
    """Return True if this processor has instructions for bfloat16; without them, bfloat16 is slower than float32."""
    known: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return any(known.get(name, False) for name in ("avx512_bf16", "amx_bf16"))


def flag(default: Any, text: str) -> Any:
    """Return a field of `Options` with a default and a help text; each field is also a flag of the command line."""
    return dataclasses.field(default=default, metadata={"help": text})


@dataclasses.dataclass(frozen=True)
class Options:
    """Sizes of the model, and of its training. The defaults suit four minutes on two cores."""

    minutes: float = flag(4.0, "time to train for")
    steps: int = flag(0, "train for this many steps instead, however long they take; 0: use the minutes")
    seed: int = flag(0, "seed of the initial weights")
    layers: int = flag(4, "layers")
    d_model: int = flag(192, "width of a row")
    heads: int = flag(6, "attention heads; they divide d_model between them")
    d_inner: int = flag(768, "width inside the feed-forward halves")
    segment: int = flag(128, "bytes in a training segment")
    memory: int = flag(128, "remembered rows per layer while training")
    streams: int = flag(8, "parallel streams in a training step")
    learning_rate: float = flag(1.5e-3, "highest learning rate")
    heldout_bytes: int = flag(250_000, "size of the held-out text")
    eval_bytes: int = flag(65_536, "how much of the held-out text to evaluate on")
    bfloat16: bool = flag(native_bfloat16(), "multiply in bfloat16 while training; the weights stay float32")

    def __post_init__(self) -> None:
        """Refuse options with which no model can be trained."""
        zero_allowed = {"seed", "steps", "bfloat16"}
        for name, value in dataclasses.asdict(self).items():
            if value < 0 or (value == 0 and name not in zero_allowed) or not math.isfinite(value):
                raise ValueError(f"{name} cannot be {value}")
        if self.d_model % self.heads or self.d_model % 2:
            raise ValueError(f"d_model {self.d_model} must be even and a multiple of the {self.heads} heads")
        if min(self.heldout_bytes, self.eval_bytes) < 2 * EVALUATION_STREAMS:
            raise ValueError(f"an evaluation needs {2 * EVALUATION_STREAMS} held-out bytes or more")


class Attention(nn.Module):
    """Causal attention over the memory and the segment, by content and by distance."""

    def __init__(self, d_model: int, heads: int, content_bias: nn.Parameter, position_bias: nn.Parameter) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.position, self.output = (
            nn.Linear(d_model, d_model, bias=False) for _ in range(5)
        )
        self.content_bias, self.position_bias = content_bias, position_bias  # biases, [H, d_head] each
        self.norm = nn.LayerNorm(d_model, eps=1e-5)

    def forward(self, x: Tensor, memory: Tensor, distances: Tensor) -> Tensor:
        """Attend from x [B, L, D] to memory [B, m, D] and to x itself; return [B, L, D].

        ``distances`` [K, D] holds the sinusoids of the distances K-1 down to 0.
        """
        batch, length, width = x.shape
        seen = torch.cat([memory, x], dim=1)
        keys = seen.shape[1]
        q = self.query(x).view(batch, length, self.heads, -1)
        k = self.key(seen).view(batch, keys, self.heads, -1).permute(0, 2, 3, 1)  # keys [B, H, d_head, K]
        v = self.value(seen).view(batch, keys, self.heads, -1).transpose(1, 2)  # values [B, H, K, d_head]
        r = self.position(distances).view(keys, self.heads, -1).permute(1, 2, 0)  # distances [H, d_head, K]
        scale = q.shape[-1] ** -0.5
        content = ((q + self.content_bias) * scale).transpose(1, 2) @ k
        position = ((q + self.position_bias) * scale).transpose(1, 2) @ r
        # Column c of `position` is distance K-1-c, but key j lies at distance m+i-j from query i: row i has to move
        # left by L-1-i. To do so, each row gets one column more, and the numbers from element L on are read again as
        # rows of the old width. Numbers of the next row land on keys after the query, which the mask removes.
        position = functional.pad(position, (1, 0)).flatten(2)[:, :, length:].view(batch, self.heads, length, keys)
        future = torch.ones(length, keys, dtype=torch.bool).triu(keys - length + 1)
        weights = (content + position).masked_fill(future, -math.inf).softmax(dim=-1)
        mixed = (weights @ v).transpose(1, 2).reshape(batch, length, width)
        normed: Tensor = self.norm(x + self.output(mixed))
        return normed


class FeedForward(nn.Module):
    """The second half of a layer, which maps each row from D numbers to d_inner and back."""

    def __init__(self, d_model: int, d_inner: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(d_model, d_inner), nn.Linear(d_inner, d_model)
        self.norm = nn.LayerNorm(d_model, eps=1e-5)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each row of x [B, L, D]; return [B, L, D]. For example, [2, 5, 32]."""
        normed: Tensor = self.norm(x + self.outer(functional.relu(self.inner(x))))
        return normed


class Layer(nn.Module):
    """One layer; the normalisation comes after each residual sum, as in the paper."""

    def __init__(self, attention: Attention, feed_forward: FeedForward) -> None:
        super().__init__()
        self.attention, self.feed_forward = attention, feed_forward

    def forward(self, x: Tensor, memory: Tensor, distances: Tensor) -> Tensor:
        """Return the layer's result [B, L, D] for its input x [B, L, D]. For example, [2, 5, 32]."""
        result: Tensor = self.feed_forward(self.attention(x, memory, distances))
        return result


class Tables(nn.Module):
    """The tables of an embedding or of a softmax. An adaptive softmax would have several, so they are in a list."""

    def __init__(self, tables: list[nn.Parameter], biases: list[nn.Parameter]) -> None:
        super().__init__()
        self.tables, self.biases = nn.ParameterList(tables), nn.ParameterList(biases)


class TransformerXL(nn.Module):
    """The language model. Its modules are named so that ``state_dict()`` has the checkpoint's tensor names."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        d_model, d_head = options.d_model, options.d_model // options.heads
        # With this deviation, rows scaled by sqrt(D) and logits of a normalised row have a deviation of about 1.
        table = nn.Parameter(torch.randn(VOCABULARY, d_model) * d_model**-0.5)
        self.embedding = Tables([table], [])
        self.softmax = Tables([table], [nn.Parameter(torch.zeros(VOCABULARY))])  # tied to the embedding's parameter
        u, v = (nn.Parameter(torch.zeros(options.heads, d_head)) for _ in range(2))  # all layers share them
        self.layers = nn.ModuleDict(
            {
                f"{i:02d}": Layer(Attention(d_model, options.heads, u, v), FeedForward(d_model, options.d_inner))
                for i in range(options.layers)
            }
        )
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        self.register_buffer("frequencies", 10_000 ** (-torch.arange(0, d_model, 2) / d_model), persistent=False)

    def empty_memory(self, streams: int) -> list[Tensor]:
        """Return the memory before the first byte: a tensor [B, 0, D] per layer."""
        return [torch.zeros(streams, 0, self.softmax.tables[0].shape[1]) for _ in self.layers]

    def forward(self, inputs: Tensor, memory: list[Tensor], memory_length: int) -> tuple[Tensor, list[Tensor]]:
        """Return the logits [B, L, V] after each of the bytes [B, L], and the memory for the next segment.

        A layer's memory [B, m, D] is what went INTO that layer for the last m <= memory_length bytes.
        """
        table = self.embedding.tables[0]
        x = functional.embedding(inputs, table) * table.shape[1] ** 0.5
        keys = memory[0].shape[1] + inputs.shape[1]
        angles = torch.arange(keys - 1, -1, -1)[:, None] * self.get_buffer("frequencies")
        distances = torch.cat([angles.sin(), angles.cos()], dim=1)  # [K, D]: all sines, then all cosines
        memory_after = []
        for layer, rows in zip(self.layers.values(), memory, strict=True):
            seen = torch.cat([rows, x.detach()], dim=1)  # detached: no gradient flows into an earlier segment
            memory_after.append(seen[:, max(0, keys - memory_length) :])
            x = layer(x, rows, distances)
        return functional.linear(x, table, self.softmax.biases[0]), memory_after


def library_text(heldout_bytes: int) -> tuple[bytes, bytes]:
    """Read the standard library's sources; return (training text, held-out text). No file is in both.

    The sources differ from one Python version to the next, which is why the held-out text's hash is recorded.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py") if path.is_file())
    # _sysconfigdata* describes one machine's build, not Python; it would make the text differ from machine to machine.
    names = [name for name in names if SKIPPED.isdisjoint(name.split("/")) and not name.startswith("_sysconfigdata")]
    heldout, names_taken = b"", set()
    for name in sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest()):
        if len(heldout) >= heldout_bytes:
            break
        heldout += (root / name).read_bytes()
        names_taken.add(name)
    return b"".join((root / name).read_bytes() for name in names if name not in names_taken), heldout[:heldout_bytes]


def as_streams(text: bytes, streams: int) -> Tensor:
    """Cut a text into parallel contiguous streams of byte values: int64 [B, bytes // B].

    For example, b"abcdef" and 2 streams give [[97, 98, 99], [100, 101, 102]].
    """
    length = len(text) // streams
    return torch.frombuffer(bytearray(text[: streams * length]), dtype=torch.uint8).view(streams, length).long()


@torch.inference_mode()
def bits_per_byte(model: TransformerXL, text: bytes, memory_length: int, advance: Callable[[int], None]) -> float:
    """Return the mean cost of a held-out byte, in bits, when the model keeps memory_length rows between segments.

    After each segment, ``advance`` is called with the number of its bytes.
    """
    data = as_streams(text, EVALUATION_STREAMS)
    memory, total, count = model.empty_memory(EVALUATION_STREAMS), 0.0, 0
    for start in range(0, data.shape[1] - 1, EVALUATION_SEGMENT):
        window = data[:, start : start + EVALUATION_SEGMENT + 1]  # its last byte is only a target
        logits, memory = model(window[:, :-1], memory, memory_length)
        total += functional.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten(), reduction="sum").item()
        count += window[:, 1:].numel()
        advance(window[:, 1:].numel())
    return total / count / math.log(2)


def fit(model: TransformerXL, text: bytes, options: Options, report: Report) -> tuple[int, float]:
    """Train the model in place; return (steps, seconds)."""
    data = as_streams(text, options.streams)
    if data.shape[1] <= options.segment:
        raise ValueError(f"{len(text)} bytes of text are too few for {options.streams} streams")
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    memory, position, smooth = model.empty_memory(options.streams), 0, math.nan
    step, started, elapsed, share = 0, time.monotonic(), 0.0, 0.0
    while share < 1:
        # The learning rate rises in a short warm-up, and falls to 0 like half a cosine; both follow the finished share.
        cosine = 0.5 * (1 + math.cos(math.pi * share))
        optimizer.param_groups[0]["lr"] = options.learning_rate * min(1.0, share / 0.04) * cosine
        if position + options.segment >= data.shape[1]:
            position, memory = 0, model.empty_memory(options.streams)
        elif step % RESTART == 0:  # generation starts from an empty memory, so training must include such starts
            memory = model.empty_memory(options.streams)
        window = data[:, position : position + options.segment + 1]
        # One context per step: autocast keeps its bfloat16 copies of the weights until its context ends, so a context
        # around the whole loop would always multiply with the weights of the first step.
        with torch.autocast("cpu", torch.bfloat16, enabled=options.bfloat16):
            logits, memory = model(window[:, :-1], memory, options.memory)
        loss = functional.cross_entropy(logits.float().flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step, position, elapsed = step + 1, position + options.segment, time.monotonic() - started
        share = step / options.steps if options.steps else elapsed / (60 * options.minutes)
        bits = loss.item() / math.log(2)
        if not math.isfinite(bits):
            raise ValueError(f"training diverged at step {step}; try a lower --learning-rate")
        smooth = bits if step == 1 else 0.95 * smooth + 0.05 * bits
        report(share, step, smooth, step * options.streams * options.segment / elapsed)
    return step, elapsed


def checkpoint(model: TransformerXL, options: Options, training: dict[str, Any]) -> dict[str, Any]:
    """Return the txl-deploy checkpoint: plain values and float32 tensors, which can be read without this file."""
    state = {name: tensor.detach().clone().contiguous() for name, tensor in model.state_dict().items()}
    # `clone` made two copies of the tied weights, which must be one tensor
    state["softmax.tables.0"] = state["embedding.tables.0"]
    config = {
        "vocab_size": VOCABULARY,
        "n_layer": options.layers,
        "n_head": options.heads,
        "d_model": options.d_model,
        "d_head": options.d_model // options.heads,
        "d_inner": options.d_inner,
        "d_embed": options.d_model,
        "cutoffs": [],
        "div_val": 1,
        "attn_type": 0,
        "pre_lnorm": False,
        "layer_norm_epsilon": 1e-5,
        "activation": "relu",
        "final_norm": False,
        "attention_bias": False,
        "softmax_bias": True,
        "embedding_scale": float(options.d_model) ** 0.5,
        "memory_start": "empty",
        "memory_length": options.memory,
        "segment_length": EVALUATION_SEGMENT,
        "clamp_length": None,
        "same_length": False,
    }
    return {
        "format": "txl-deploy.checkpoint",
        "version": 1,
        "config": config,
        "state": state,
        "vocabulary": {"kind": "bytes"},
        "training": training,
    }


told: list[int] = []
"""Numbers of the signals that have arrived."""


def stop(number: int, frame: FrameType | None = None) -> None:
    """Remember the signal and end the run. Python drops an exception that is raised while an object is deleted."""
    told.append(number)
    raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)


def go_on() -> None:
    """End the run if a signal has arrived whose exception Python dropped."""
    if told:
        stop(told[0])


class Screen(Console):
    """A terminal whose cursor is never hidden, because a run that is killed or suspended could not bring it back."""

    def show_cursor(self, show: bool = True) -> bool:
        """Do nothing; False says that the cursor was not changed."""
        return False


def train(out: Path, options: Options, force: bool = False) -> dict[str, Any]:
    """Train and evaluate a model, and write the three files into ``out``; return the facts of the run.

    Raises FileExistsError before any training when one of the files exists and ``force`` is not set. No file is
    written before training and evaluation have succeeded.
    """
    existing = [name for name in FILES if (out / name).exists()]
    if existing and not force:
        raise FileExistsError(f"{out} already holds {', '.join(existing)}; give --force to replace")
    out.mkdir(parents=True, exist_ok=True)  # before training, so that a folder that cannot be made is noticed early
    text, heldout = library_text(options.heldout_bytes)
    torch.manual_seed(options.seed)
    model = TransformerXL(options)

    screen = Screen(stderr=True)
    column = Column(
        no_wrap=True, overflow="ellipsis", max_width=max(screen.width - 32, 8)
    )  # on a narrow terminal this column is cut first
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[said]}", table_column=column),
    )
    with Progress(*columns, console=screen) as progress:
        task = progress.add_task("step 0", total=1.0, said="")

        def evaluated_some(count: int) -> None:
            go_on()
            progress.advance(evaluating, count)

        def report(share: float, step: int, bits: float, speed: float) -> None:
            go_on()
            column = f"{bits:.3f} bits per byte, {speed:,.0f} bytes/s"
            progress.update(task, completed=min(share, 1.0), description=f"step {step}", said=column)

        steps, seconds = fit(model, text, options, report)

        started, evaluated = time.monotonic(), heldout[: options.eval_bytes]
        memories, bits = (0, options.memory, 4 * options.memory), {}
        targets = as_streams(evaluated, EVALUATION_STREAMS)[:, 1:].numel()
        evaluating = progress.add_task("evaluate", total=len(memories) * targets, said="")
        for length in memories:
            progress.update(evaluating, said=f"memory {length}")
            bits[str(length)] = bits_per_byte(model, evaluated, length, evaluated_some)
    training = {
        **dataclasses.asdict(options),
        "steps": steps,
        "minutes": seconds / 60,
        "bytes_seen": steps * options.streams * options.segment,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "text": f"the standard library of Python {platform.python_version()}",
        "text_bytes": len(text),
        "heldout_bytes": len(heldout),
        "heldout_sha256": hashlib.sha256(heldout).hexdigest(),
        "heldout_bits_per_byte": bits,  # bits by memory length
        "evaluated_bytes": min(len(heldout), options.eval_bytes),
        "evaluation_seconds": time.monotonic() - started,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }
    partial = {name: out / f".{name}.partial" for name in FILES}
    try:
        torch.save(checkpoint(model, options, training), partial["model.pt"])
        partial["heldout.txt"].write_bytes(heldout)
        partial["vocabulary.json"].write_text(json.dumps({"kind": "bytes"}) + "\n")
        for name, path in partial.items():
            path.replace(out / name)  # renamed, so that no reader sees half a file
    finally:
        for path in partial.values():
            path.unlink(missing_ok=True)
    return training


def show(facts: dict[str, Any], out: Path) -> None:
    """Print the facts of a run that readers want first."""
    table = Table(title="Transformer-XL on the Python standard library", show_header=False)
    table.add_column()
    table.add_column(overflow="fold")  # wraps a long hash or path, which would be useless if cut off
    table.add_row("parameters", f"{facts['parameters']:,}")
    table.add_row("training", f"{facts['steps']:,} steps in {facts['minutes']:.2f} minutes")
    for length, bits in facts["heldout_bits_per_byte"].items():
        table.add_row(f"held-out bits per byte, memory {length}", f"{bits:.3f}")
    table.add_row("held-out text", f"{facts['heldout_bytes']:,} bytes, of which {facts['evaluated_bytes']:,} evaluated")
    table.add_row("its SHA-256", facts["heldout_sha256"])
    table.add_row("written", escape("\n".join(str(out / name) for name in FILES)))
    Console().print(table)


def main(argv: list[str] | None = None) -> int:
    """Read the flags, train, and print the results; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="the folder for " + ", ".join(FILES))
    parser.add_argument("--force", action="store_true", help="replace files that are already there")
    parser.add_argument("--threads", type=int, default=2, help="processor threads (default: %(default)s)")
    for field in dataclasses.fields(Options):
        name, text = "--" + field.name.replace("_", "-"), field.metadata["help"] + " (default: %(default)s)"
        if isinstance(field.default, bool):
            parser.add_argument(name, action=argparse.BooleanOptionalAction, default=field.default, help=text)
        else:
            parser.add_argument(name, type=type(field.default), default=field.default, help=text)
    flags = vars(parser.parse_args(argv))
    out, force, threads = flags.pop("out"), flags.pop("force"), flags.pop("threads")
    try:
        torch.set_num_threads(max(1, threads))
        show(train(out, Options(**flags), force), out)
    except KeyboardInterrupt:
        print("interrupted: nothing was saved", file=sys.stderr)
        return 130
    except (OSError, ValueError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    # without this, a stopped run would leave half a bar in the terminal, and half a file in the folder
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, stop)
    sys.unraisablehook = lambda found: None if told else sys.__unraisablehook__(found)
    sys.exit(main())
