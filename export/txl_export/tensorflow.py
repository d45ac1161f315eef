"""Refuses checkpoints that TensorFlow wrote, with the command that converts them."""

from __future__ import annotations

import re
from pathlib import Path

from txl_runtime.errors import CheckpointError

SUFFIX = re.compile(r"\.(index|meta|data-\d+-of-\d+)$")
"""Endings of a TensorFlow checkpoint's files; the text before is the checkpoint's prefix, e.g. model.ckpt-0."""


def refuse_tensorflow(path: Path) -> None:
    """Refuse a TensorFlow checkpoint, given as the prefix of its files or as a folder that has no config.json.

    Raises:
        CheckpointError: the path is such a prefix or folder.
    """
    if path.is_file() or (path / "config.json").exists():
        return
    index_files = sorted(path.glob("*.index")) if path.is_dir() else [Path(f"{path}.index")]
    if index_files and index_files[0].exists():
        raise CheckpointError(f"{path}: {converting(index_files[0])}")


def converting(file: Path) -> str:
    """Return the advice to convert a TensorFlow checkpoint, with the command; `file` is one of its files."""
    return (
        "this is a TensorFlow checkpoint, expected PyTorch; convert it where TensorFlow and transformers 4.36 to 4.47 "
        "are: python -m transformers.models.deprecated.transfo_xl.convert_transfo_xl_original_tf_checkpoint_to_pytorch "
        f"--tf_checkpoint_path {SUFFIX.sub('', str(file))} --transfo_xl_config_file config.json "
        "--pytorch_dump_folder_path FOLDER, and export FOLDER"
    )
