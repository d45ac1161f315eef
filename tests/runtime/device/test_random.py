"""Whatever is done to streams of a device, in whatever order its work is done: they say what those of the CPU say.

`random_operations` has what is done. Each seed draws it anew, together with when the stand-in does its work.
"""

from __future__ import annotations

import pytest
from random_operations import KINDS, WAYS, play, threads

SEEDS, LONGER, SOME = 126, 60, 12
"""Seeds of the whole sweep for each kind, for those whose programs take longer (1,000 in all), and of a sample."""
AT_ONCE = ("plain", "biased", "replace")
"""Kinds of which some seeds are part of the fast tests: their bundles are there, or are made in no time."""
every = pytest.mark.parametrize(("name", "update"), KINDS, ids=lambda value: value)


@pytest.mark.parametrize(("name", "update"), [kind for kind in KINDS if set(kind) & set(AT_ONCE)], ids=lambda v: v)
def test_a_device_says_what_the_cpu_says(cases, name, update):
    for seed in range(len(WAYS)):
        play(cases(name, update), seed)


@pytest.mark.slow(keep=len(KINDS))
@every
def test_a_device_says_what_the_cpu_says_for_every_seed(cases, name, update, whole_sweep):
    seeds = LONGER if name == "plain" else SEEDS
    for seed in range(100, 100 + (seeds if whole_sweep else SOME)):
        play(cases(name, update), seed, turns=16)


@pytest.mark.parametrize(("name", "update"), [("plain", "ring"), ("recurrent", "replace")], ids=lambda value: value)
def test_eight_threads_say_what_the_cpu_says(cases, name, update):
    threads(cases(name, update), 1)


@pytest.mark.slow
@every
def test_eight_threads_say_what_the_cpu_says_for_every_seed(cases, name, update):
    for seed in range(2, 5):
        threads(cases(name, update), seed)
