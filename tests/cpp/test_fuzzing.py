"""Hostile bytes for the readers of the runtime in C++, by libFuzzer: ten seconds each, or $TXL_FUZZ_SECONDS.

What escapes, hangs or takes too much memory is a finding; the test shows the end of the log, which has the input.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import cpp_seeds
import pytest

SECONDS = int(os.environ.get("TXL_FUZZ_SECONDS", "10"))
pytestmark = [pytest.mark.slow(keep=9), pytest.mark.timeout(1200 + 2 * SECONDS)]  # whoever comes first builds


def fuzzed(program: Path, seeds: Path, *options: str) -> str:
    """The log of a target on a folder of inputs."""
    if not program.is_file():
        pytest.skip("clang with libclang-rt-dev is not installed, whose libFuzzer the targets are built with")
    command = [program, *options, "-print_final_stats=1", "-timeout=20", "-rss_limit_mb=2048", "-max_len=262144", "."]
    done = subprocess.run(command, cwd=seeds, capture_output=True, text=True, errors="replace", check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stderr


@pytest.mark.parametrize("target", cpp_seeds.SUFFIXES)
def test_no_hostile_bytes_do_more_than_be_refused(built: Path, engine: Path, target: str, tmp_path: Path) -> None:
    (seeds := tmp_path / "seeds").mkdir()
    count = cpp_seeds.write(target, seeds)
    alone = fuzzed(built / f"txl-fuzz-{target}", seeds, "-runs=0")
    (good,) = re.findall(r"accepted (\d+) of \d+", alone)
    assert 10 <= int(good) < count or target in ("weights", "snapshot", "vectors"), alone[-500:]
    log = fuzzed(built / f"txl-fuzz-{target}", seeds, f"-max_total_time={SECONDS}", "-artifact_prefix=../")
    accepted, every = map(int, re.findall(r"accepted (\d+) of (\d+)", log)[0])
    print(f"{target}: {every} inputs, {accepted} of them accepted")
    assert every > accepted > 0
