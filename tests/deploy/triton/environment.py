"""Installs Triton's server with its Python backend, and what a model needs there, for the tests of packages alone.

    python environment.py FOLDER

The wheel of nvidia-pytriton carries a whole server. Nothing of it is imported here: its program is started as that of
a server that somebody installed. It runs models in processes ("stubs"), one for each version of Python that it knows,
which find a Python by its shared library. What models import is installed for that Python, with NumPy 1.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

WHEEL = "nvidia-pytriton==0.7.0"
PACKAGES = ("numpy==1.26.4", "onnxruntime==1.31.1", "msgspec==0.22.0", "safetensors==0.8.0", "flatbuffers==25.12.19")
PACKAGES += ("protobuf==7.36.2", "packaging==26.3")
VERSION = f"{sys.version_info[0]}.{sys.version_info[1]}"


def install(folder: Path, *wheels: str) -> None:
    """Wheels, without what they depend on, into a folder."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
    subprocess.run([*pip, "--no-deps", "--only-binary", ":all:", "--target", folder, *wheels], check=True)


def main() -> None:
    """Make the folder."""
    folder = Path(sys.argv[1]).absolute()
    library = Path(sysconfig.get_config_var("LIBDIR")) / f"libpython{VERSION}.so.1.0"
    if sys.platform != "linux" or not library.exists():
        print(f"{library}: not there, expected a Python with a shared library on Linux; Triton is left out")
        return
    shutil.rmtree(folder, ignore_errors=True)
    try:
        install(folder / "server", WHEEL)
        install(folder / "site", *PACKAGES)
    except subprocess.CalledProcessError as error:
        print(f"{error.cmd[-1]} cannot be installed for Python {VERSION}; Triton is left out")
        return
    home = folder / "server" / "pytriton" / "tritonserver"
    shutil.copy(home / "python_backend_stubs" / VERSION / "triton_python_backend_stub", home / "backends" / "python")
    shutil.rmtree(home / "python_backend_stubs")
    told = {
        "server": str(home / "bin" / "tritonserver"),
        "backends": str(home / "backends"),
        "libraries": [str(folder / "server" / "nvidia_pytriton.libs"), str(library.parent)],
        "site": str(folder / "site"),
    }
    (folder / "ready.json").write_text(json.dumps(told, indent=2))


if __name__ == "__main__":
    main()
