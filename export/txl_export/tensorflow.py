"""Checkpoints that TensorFlow wrote: they are recognised, and the way to convert them is named."""

from __future__ import annotations

import re
from pathlib import Path

from txl_runtime.errors import CheckpointError

SUFFIX = re.compile(r"\.(index|meta|data-\d+-of-\d+)$")
"""Of the files of one checkpoint, behind the prefix that they share, such as model.ckpt-0."""


def refuse_tensorflow(path: Path) -> None:
    """Refuse a prefix, which is no file itself, and a folder of such files without a Hugging Face model.

    Raises:
        CheckpointError: it is one.
    """
    is_folder = path.is_dir() and not (path / "config.json").exists() and _prefixes(path)
    if is_folder or (not path.exists() and Path(f"{path}.index").exists()):
        raise CheckpointError(f"{path}: {converting(path)}")


def converting(path: Path) -> str:
    """What to do about a checkpoint, named by its prefix, its folder or one of its files."""
    folder = path if path.is_dir() else path.parent
    among = _prefixes(folder) if path.is_dir() or path.name == "checkpoint" else [SUFFIX.sub("", str(path))]
    return (
        "this is a TensorFlow checkpoint, expected PyTorch; convert it where TensorFlow and transformers 4.36 to 4.47 "
        "are: python -m transformers.models.deprecated.transfo_xl.convert_transfo_xl_original_tf_checkpoint_to_pytorch "
        f"--tf_checkpoint_path {among[0] if among else 'PREFIX'} --transfo_xl_config_file config.json "
        "--pytorch_dump_folder_path FOLDER, and export FOLDER"
    )


def _prefixes(folder: Path) -> list[str]:
    return [SUFFIX.sub("", str(file)) for file in sorted(folder.glob("*.index"))]
