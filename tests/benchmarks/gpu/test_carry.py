"""Packages in pieces: what comes out is what went in, and pieces that are not all of it, or not it, are refused."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import carry
import pytest

FOLDER = Path(__file__).parents[3] / "benchmarks" / "gpu"


@pytest.fixture
def pieces(tmp_path: Path) -> Path:
    """A folder and a wheel, in pieces of 1 MiB."""
    (tmp_path / "in" / "below").mkdir(parents=True)
    (tmp_path / "in" / "below" / "large").write_bytes(bytes(range(256)) * 2**13)
    (tmp_path / "in" / "empty").touch()
    (tmp_path / "in" / "__pycache__").mkdir()
    (tmp_path / "in" / "__pycache__" / "old.pyc").touch()
    with zipfile.ZipFile(tmp_path / "own-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("own/__init__.py", "ONE = 1\n")
        wheel.writestr("own-1.data/purelib/own/two.py", "TWO = 2\n")
        wheel.writestr("own-1.data/scripts/own", "nobody needs it here\n")
        wheel.writestr("own/my.data/table", "a folder of the package's own\n")
    sources = [str(tmp_path / "in"), str(tmp_path / "own-1-py3-none-any.whl")]
    assert carry.main(["split", *sources, "--out", str(tmp_path / "pieces"), "--mib", "1"]) == 0
    return tmp_path / "pieces"


def join(pieces: Path) -> int:
    return carry.main(["join", str(pieces), "--site", str(pieces.parent / "site")])


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_was_cut_comes_out_again_and_wheels_are_unpacked(pieces: Path) -> None:
    sizes = [path.stat().st_size for path in sorted(pieces.glob("0*"))]
    assert len(sizes) == 3
    assert sizes[:2] == [2**20] * 2
    assert sizes[2] < 2**20
    bare = [sys.executable, "-I", "-S", FOLDER / "carry.py", "join", pieces, "--site", pieces.parent / "site"]
    done = subprocess.run([str(word) for word in bare], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "3 files" in done.stdout
    expected = files(pieces.parent / "in") | {"own/__init__.py": b"ONE = 1\n", "own/two.py": b"TWO = 2\n"}
    expected["own/my.data/table"] = b"a folder of the package's own\n"
    del expected["__pycache__/old.pyc"]
    assert files(pieces.parent / "site") == expected


def images(*capabilities: int) -> bytes:
    """A set of images as a library holds it, each with as many bytes of its number as that says."""
    made = b"".join(carry.IMAGE.pack(2, 257, 64, sm, sm).ljust(64, b"h") + bytes([sm]) * sm for sm in capabilities)
    return carry.FATBIN.pack(carry.MAGIC, 1, 16, len(made)) + made


def test_the_code_of_one_gpu_is_carried_and_all_else_stays(tmp_path: Path) -> None:
    """A set without code for it stays whole: its kernels may be for all by another way."""
    library = (
        b"before" + images(80, 90, 120) + b"between" + images(75, 80) + carry.FATBIN.pack(carry.MAGIC, 1, 16, 10**9)
    )
    (tmp_path / "wheels").mkdir()
    with zipfile.ZipFile(tmp_path / "wheels" / "own-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("own/lib.so", library)
        wheel.writestr("own/__init__.py", images(80, 90))
    assert carry.main(["split", str(tmp_path / "wheels"), "--out", str(tmp_path / "pieces"), "--only-sm", "90"]) == 0
    assert join(tmp_path / "pieces") == 0
    found = files(tmp_path / "site")
    expected = library.replace(bytes([80]) * 80, bytes(80), 1).replace(bytes([120]) * 120, bytes(120))
    assert found == {"own/lib.so": expected, "own/__init__.py": images(80, 90)}


def change(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1] + b"?")


def crafted(pieces: Path, name: str, kind: bytes = tarfile.REGTYPE) -> None:
    """One piece that `split` would not write, with a right index."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        member = tarfile.TarInfo(name)
        member.type, member.linkname = kind, "/etc"
        archive.addfile(member)
    (pieces / "000").write_bytes(data.getvalue())
    names = {"000": hashlib.sha256(data.getvalue()).hexdigest()}
    (pieces / "index.json").write_text(json.dumps({"format": carry.FORMAT, "pieces": names}))


FAULTS = {
    "a piece is missing": (lambda pieces: (pieces / "001").unlink(), "lacks 001, expected 3 pieces"),
    "a piece is another": (lambda pieces: change(pieces / "001"), "001 has another SHA-256 than when it was cut"),
    "no index": (lambda pieces: (pieces / "index.json").unlink(), "has no index.json"),
    "an index of something": (lambda pieces: (pieces / "index.json").write_text("[]"), "is no index of pieces"),
    "an index of another time": (
        lambda pieces: (pieces / "index.json").write_text('{"format": "txl-deploy.pieces.2", "pieces": {}}'),
        "is no index of pieces",
    ),
    "a link": (lambda pieces: crafted(pieces, "own", tarfile.SYMTYPE), "own is no plain file"),
    "a folder": (lambda pieces: crafted(pieces, "own", tarfile.DIRTYPE), "own is no plain file"),
    "a pipe": (lambda pieces: crafted(pieces, "own", tarfile.FIFOTYPE), "own is no plain file"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_pieces_that_are_not_what_was_cut_are_refused_before_anything_is_written(
    fault: str, pieces: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    break_it, said = FAULTS[fault]
    break_it(pieces)
    assert join(pieces) == 2
    assert said in capsys.readouterr().err
    assert not (pieces.parent / "site").exists()


@pytest.mark.parametrize("name", ["../out", "below/../../out", "/tmp/out", "below\\..\\out", "C:out"])
def test_a_name_that_leads_out_is_refused(name: str, pieces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    crafted(pieces, name)
    assert join(pieces) == 2
    assert "leads out of the folder" in capsys.readouterr().err
    (pieces / "index.json").write_text(json.dumps({"format": carry.FORMAT, "pieces": {name: ""}}))
    assert join(pieces) == 2
    assert "leads out of the folder" in capsys.readouterr().err
    with zipfile.ZipFile(pieces.parent / "bad.whl", "w") as wheel:
        wheel.writestr(zipfile.ZipInfo("own-1.data/purelib/../../out"), "")
    with pytest.raises(carry.CarryError, match="leads out"):
        list(carry._members(pieces.parent / "bad.whl"))
    assert not (pieces.parent / "out").exists()
    assert not (pieces.parent / "site").exists()


def test_what_cannot_be_split_is_refused(pieces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (pieces.parent / "other").mkdir()
    (pieces.parent / "other" / "empty").touch()
    both = [str(pieces.parent / "in"), str(pieces.parent / "other")]
    assert carry.main(["split", *both, "--out", str(pieces.parent / "more")]) == 2
    assert "empty is there twice" in capsys.readouterr().err
    assert carry.main(["split", both[0], "--out", str(pieces)]) == 2
    assert "is not empty, expected a new folder" in capsys.readouterr().err
    assert carry.main(["split", str(pieces.parent / "none"), "--out", str(pieces.parent / "more")]) == 2
