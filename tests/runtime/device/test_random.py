"""Whatever is done to streams of a device, in whatever order its work is done: they say what those of the CPU say.

`random_operations` has what is done. Each seed draws it anew, together with when the stand-in does its work.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from random_operations import KINDS, Case, Play, open_case
from stand_ins.driver import FakeDriver

SEEDS = 1000
"""Of the sweep, over all kinds."""
AT_ONCE = ("plain", "replace")
"""Kinds of which some seeds are part of the fast tests: their bundles are there, or are made in no time."""
every = pytest.mark.parametrize(("name", "update"), KINDS, ids=lambda value: value)


@pytest.fixture(scope="module")
def cases(make_bundle, tmp_path_factory) -> Callable[[str, str], Case]:
    made: dict[tuple[str, str], Case] = {}

    def find(name: str, update: str) -> Case:
        if (name, update) not in made:
            made[name, update] = open_case(name, update, make_bundle, tmp_path_factory.mktemp("steps"))
        return made[name, update]

    return find


@pytest.fixture(scope="module", autouse=True)
def _little_to_collect() -> Iterator[None]:
    """What is there by now need not be looked through by every `gc.collect`."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def play(case: Case, seed: int, turns: int = 20) -> None:
    """One seed from the opening of the device to its end, when everything was given back."""
    driver = FakeDriver(seed)
    game = Play(case, case.open(driver, recordable=seed % 5 > 0), seed)
    try:
        game.go(turns)
    except Exception as error:
        raise AssertionError(f"seed {seed} after {', '.join(game.said)}: {error}") from error
    finally:
        del game
    driver.check(everything=True)
    FakeDriver.made.remove(driver)


@pytest.mark.parametrize(("name", "update"), [kind for kind in KINDS if set(kind) & set(AT_ONCE)], ids=lambda v: v)
def test_a_device_says_what_the_cpu_says(cases, name, update):
    for seed in range(6):
        play(cases(name, update), seed)


@pytest.mark.slow
@every
def test_a_device_says_what_the_cpu_says_for_every_seed(cases, name, update):
    for seed in range(100, 100 + -(-SEEDS // len(KINDS))):
        play(cases(name, update), seed)


def threads(case: Case, seed: int, number: int = 8, turns: int = 12) -> None:
    """Streams of one model, each in a thread of its own."""
    driver = FakeDriver(seed)
    model = case.open(driver)
    games = [Play(case, model, 1000 * seed + index, pairs=1) for index in range(number)]
    with ThreadPoolExecutor(number) as pool:
        for running in [pool.submit(game.go, turns) for game in games]:
            running.result(timeout=120)
    del running, games, model, pool
    driver.check(everything=True)
    FakeDriver.made.remove(driver)


@pytest.mark.parametrize(("name", "update"), [("plain", "ring"), ("recurrent", "replace")], ids=lambda value: value)
def test_eight_threads_say_what_the_cpu_says(cases, name, update):
    threads(cases(name, update), 1)


@pytest.mark.slow
@every
def test_eight_threads_say_what_the_cpu_says_for_every_seed(cases, name, update):
    for seed in range(2, 5):
        threads(cases(name, update), seed)
