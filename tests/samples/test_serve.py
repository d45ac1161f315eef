"""The samples of a container and a service: their commands are the real one's, and what they say of stopping holds."""

from __future__ import annotations

import ast
import configparser
import json
import re
import shlex
import shutil
import subprocess
import sys
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

import pytest
import typer
from frozen import frozen
from serving import serving
from typer.main import get_command

from txl_deploy.commands import serve
from txl_deploy.serve.server import CONNECTIONS

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "samples" / "serve"
CONTAINER, UNIT = FOLDER / "Containerfile", FOLDER / "txl-deploy@.service"


def options_of(arguments: list[str]) -> dict[str, Any]:
    """Return these arguments as `txl-deploy serve` understands them; a wrong one is an error."""
    app = typer.Typer()
    app.command("serve")(serve.run)
    return get_command(app).make_context("serve", arguments).params


def service() -> dict[str, str]:
    """The section [Service] of the instance for port 8001; of what is said twice the last."""
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str
    unit.read_string(UNIT.read_text().replace("%i", "8001"))
    return dict(unit["Service"])


def instruction(name: str) -> list[str]:
    """The list behind an instruction of the container file."""
    text = CONTAINER.read_text().replace("\\\n", " ")
    (line,) = re.findall(rf"^\s*{name} (\[.*\])$", text, re.MULTILINE)
    return json.loads(line)


def health_check() -> list[str]:
    """The command that tells whether a container is well."""
    text = CONTAINER.read_text().replace("\\\n", " ")
    return ast.literal_eval(re.search(r"HEALTHCHECK.*CMD (\[.*\])", text)[1])


def test_the_unit_calls_the_command_as_it_is() -> None:
    command = shlex.split(service()["ExecStart"])
    assert command[0].endswith("/txl-deploy")
    assert command[1] == "serve"
    found = options_of(command[2:])
    assert (found["host"], found["port"]) == ("127.0.0.1", 8001)
    assert found["checkpoint_dir"].parts[0] == "${STATE_DIRECTORY}"
    assert service()["StateDirectory"] == "txl-deploy-8001", "each instance has sessions of its own"


def test_the_unit_gives_more_time_to_stop_than_draining_takes() -> None:
    found, drain = service(), options_of(shlex.split(service()["ExecStart"])[2:])["drain_seconds"]
    assert float(found["TimeoutStopSec"]) >= drain + 15
    assert (found["KillSignal"], found["Restart"], found["DynamicUser"]) == ("SIGTERM", "on-failure", "yes")
    assert float(found["LimitNOFILE"]) > 2 * CONNECTIONS


def steps() -> list[str]:
    """The commands at the head of the unit."""
    return re.findall(r"^# {5}(.*)$", UNIT.read_text(), re.MULTILINE)


def test_the_units_steps_make_what_it_names(tmp_path: Path) -> None:
    """All but those that install packages and that start it; in folders of this test."""
    for name in ("docs", "samples"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "model.txl").mkdir()
    (tmp_path / "token").write_text("secret")
    (tmp_path / "opt" / "txl-deploy").mkdir(parents=True)
    there = re.compile(r"(?<=[ :])/(?=opt/|etc/)")
    copying = [step for step in steps() if step.split()[0] in ("install", "cp")]
    for step in copying:
        subprocess.run(["bash", "-c", there.sub(f"{tmp_path}/", step)], check=True, cwd=tmp_path, timeout=60)
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str
    unit.read(UNIT)
    named = [address.removeprefix("file:") for address in unit["Unit"]["Documentation"].split()]
    named += [
        service()["LoadCredential"].removeprefix("token:"),
        options_of(shlex.split(service()["ExecStart"])[2:])["bundle"],
    ]
    assert len(named) == 4
    for path in named:
        assert (tmp_path / str(path).removeprefix("/")).exists(), path
    assert (tmp_path / "etc/systemd/system" / UNIT.name).read_text() == UNIT.read_text()
    assert (tmp_path / "etc/txl-deploy/token").stat().st_mode & 0o777 == 0o600


def test_both_install_a_wheel_of_this_checkout_and_no_name_of_an_index() -> None:
    about = metadata("txl-deploy")
    (installing,) = (step for step in steps() if " install -c " in step)
    pattern, extras = re.search(r'"\$\(ls dist/(\S+)\)\[(.*)\]"$', installing).groups()
    assert pattern == f"{about['Name'].replace('-', '_')}-*.whl"
    assert set(extras.split(",")) <= set(about.get_all("Provides-Extra"))
    assert steps().index("make wheel") < steps().index(installing)
    for text in (UNIT.read_text(), CONTAINER.read_text()):
        assert not re.search(r"install [^#\n]*\btxl-deploy\[", text)
        assert re.search(r"^#     make wheel$", text, re.MULTILINE)


def test_systemd_waits_until_the_server_listens() -> None:
    found = service()
    assert found["Type"] == "notify"
    assert float(found["TimeoutStartSec"]) >= 60
    assert "AF_UNIX" in found["RestrictAddressFamilies"].split(), "the socket on which it is told"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    copy = tmp_path / UNIT.name.replace("@", "@8001")
    copy.write_text(re.sub(r"ExecStart=\S+", f"ExecStart={sys.executable}", UNIT.read_text()))
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", copy], capture_output=True, text=True, timeout=60)
    said = [line for line in (done.stdout + done.stderr).splitlines() if copy.name in line]
    assert said == []


def test_the_container_calls_the_command_as_it_is_and_as_nobody() -> None:
    command = [*instruction("ENTRYPOINT"), *instruction("CMD")]
    assert command[:2] == ["txl-deploy", "serve"]
    found, text = options_of(command[2:]), CONTAINER.read_text()
    assert found["host"] == "0.0.0.0"
    assert found["token_file"] is not None
    assert found["name"] == "model", "and not that of the folder in the container"
    assert options_of([*command[2:], "--name", "mine"])["name"] == "mine"
    assert "\nUSER 10001\n" in text
    assert "\nSTOPSIGNAL SIGTERM\n" in text
    (stop,) = re.findall(r"--stop-timeout (\d+)", text)
    assert int(stop) >= found["drain_seconds"] + 15


@pytest.mark.slow
def test_the_containers_health_check_tells_a_server_from_none() -> None:
    program, flag, code = health_check()
    assert (program, flag) == ("python", "-c")

    def asked(port: int) -> int:
        there = code.replace("127.0.0.1:8000", f"127.0.0.1:{port}")
        return subprocess.run([sys.executable, "-c", there], capture_output=True, timeout=60).returncode

    with serving(frozen("clusters")) as server:
        port = int(server.url.rpartition(":")[2])
        assert asked(port) == 0
    assert asked(port) == 1
