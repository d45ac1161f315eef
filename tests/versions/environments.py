"""Makes the environments that `test_versions.py` runs in: the lowest declared versions and the newest there are.

    python environments.py FOLDER [--every]

The lowest on the oldest Python that this project is for, the newest on the newest Python that is installed here; with
--every both on each. What is declared is read from the wheel. A Python that is not here is left out.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import zipfile
from email import message_from_string
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
OLDEST, NEWEST = 10, 20
EXTRAS = ("", "cpu", "cli", "build")
TESTS = ("pytest", "hypothesis")


def pythons() -> dict[int, Path]:
    """The Pythons 3.x that are installed here, by x: those on the path, and pyenv's."""
    kept = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = {}
    for minor in range(OLDEST, NEWEST):
        named = shutil.which(f"python3.{minor}")
        places = [Path(named)] if named else []
        places += sorted(kept.glob(f"3.{minor}.*/bin/python"), reverse=True)
        for place in places:
            asked = [place, "-c", "import sys, venv, ensurepip; print(sys.version_info[1], sys.executable)"]
            answer = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.split()
            if answer[:1] == [str(minor)]:  # what pyenv puts on the path may not run
                found[minor] = Path(answer[1])
                break
    return found


def build_wheel(folder: Path) -> Path:
    """The project's wheel."""
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    (found,) = folder.glob("*.whl")
    return found


def lowest(wheel: Path) -> list[str]:
    """Return the requirements of the runtime and the command line, as pins of the lowest versions."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = message_from_string(archive.read(name).decode())
    needs = [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]
    others = [need for need in needs if need.name != "txl-deploy"]
    wanted = [n for n in others if n.marker is None or any(n.marker.evaluate({"extra": extra}) for extra in EXTRAS)]
    return [f"{need.name}{need.specifier}".replace(">=", "==") for need in wanted]


def make(folder: Path, python: Path, wheel: Path, pins: list[str]) -> None:
    """One environment. Wheels alone: nothing is compiled here."""
    subprocess.run([python, "-m", "venv", "--clear", folder], check=True)
    pip = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--only-binary", ":all:"]
    environment = os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_CONSTRAINT": ""}
    subprocess.run([*pip, *pins, f"txl-deploy[cpu,cli,build] @ file://{wheel}", *TESTS], check=True, env=environment)


def main() -> None:
    """Make them."""
    parser = argparse.ArgumentParser(description="Environments of the lowest and the newest versions.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--every", action="store_true", help="both on each Python that is here")
    arguments = parser.parse_args()
    shutil.rmtree(arguments.folder, ignore_errors=True)
    folder = arguments.folder.absolute()
    folder.mkdir(parents=True)
    wheel, here = build_wheel(folder), pythons()
    wanted = [("lowest", OLDEST), ("newest", max(here))]
    if arguments.every:
        wanted = [(kind, minor) for minor in here for kind in ("lowest", "newest")]
    for kind, minor in wanted:
        if minor not in here:
            print(f"Python 3.{minor} is not installed here: {kind} left out")
            continue
        try:
            make(folder / f"{kind}-3.{minor}", here[minor], wheel, lowest(wheel) if kind == "lowest" else [])
        except subprocess.CalledProcessError as error:
            shutil.rmtree(folder / f"{kind}-3.{minor}")
            print(f"{kind} on Python 3.{minor} cannot be installed: {error.cmd[0]} … {error.cmd[-1]}")


if __name__ == "__main__":
    main()
