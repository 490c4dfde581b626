"""Every law on cases that together have every pair of values of two axes, and on those that once failed.

`--cases N --seed S` draws further ones. Whatever fails is shrunk, and named by a line for
corpus.txt.
"""

from __future__ import annotations

from dataclasses import fields, replace
from functools import cache
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from framework import IS_PADDLE
from oracle.case import AXES, Case, covering, drawn, lines, shrink
from oracle.faces import Node, normal, run
from oracle.golden import golden, scene_of
from oracle.held import storage_bytes
from oracle.laws import LAWS, broken

# The reference engine has the same arithmetic through Paddle as through PyTorch. So the axes that choose a
# function, its numbers and loud operands need not meet there again the others on which only numbers
# depend, nor each law, nor each size. They meet every face, arrangement, way of gradients, schedule and
# arrival.
NUMBERS = ("activation", "own", "scene")
OF_NUMBERS = (*NUMBERS, "recipe", "save_z", "fp8_wgrad", "iso_weight", "law", "sizes")
APART = [(one, other) for one in NUMBERS for other in OF_NUMBERS if one != other]
CORPUS = lines(Path(__file__).with_name("corpus.txt").read_text(encoding="utf-8"))


@cache
def covering_set() -> list[Case]:
    """Made by the first test of a process, because collecting tests should take no time."""
    return covering(normal, apart=APART if IS_PADDLE else ())


def problems(case: Case, engine: str = "reference") -> list[str]:
    """What is wrong, an error included."""
    try:
        return broken(case, engine)
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]


def require_sound(case: Case) -> None:
    wrong = problems(case)
    if wrong:
        kind = wrong[0].split()[0]
        small = shrink(case, lambda c: normal(c) == c and any(kind in w for w in problems(c)))
        pytest.fail("\n".join([*problems(small), f"corpus line: {small}", f"found by: {case}"]))


@pytest.mark.parametrize("part", range(20))
def test_every_pair_of_values(part):
    for case in covering_set()[part::20]:
        require_sound(case)


@pytest.mark.parametrize("line", CORPUS)
def test_what_once_failed(line):
    require_sound(normal(Case.parse(line)))


def test_drawn_cases(request):
    """None without `--cases`."""
    for case in drawn(
        request.config.getoption("--cases"), request.config.getoption("--seed"), normal
    ):
        require_sound(case)


def pairs_of(cases):
    """Every pair of values. K is left out, because faces with one slot a token change it."""
    for case in cases:
        values = ((name, getattr(case, name)) for name in AXES if name != "sizes")
        for one, other in combinations([*values, ("sizes", case.sizes[:4])], 2):
            if not IS_PADDLE or {(one[0], other[0]), (other[0], one[0])}.isdisjoint(APART):
                yield one, other


def test_the_covering_set_has_every_pair_and_value_and_few_cases():
    found = covering_set()
    assert 100 <= len(found) <= 260
    assert {*pairs_of(drawn(200, 0, normal))} <= {*pairs_of(found)}
    for name, values in AXES.items():
        seen = {getattr(case, name) for case in found}
        missing = set(values) - seen
        if not IS_PADDLE:
            # The face that sorts rows has one slot a token, so sizes come with other K too.
            assert not missing or name == "sizes", (name, missing)


def test_a_line_gives_its_case_back():
    for case in covering_set():
        assert Case.parse(str(case)) == case
    assert str(Case()) == "defaults" and Case.parse("defaults") == Case()
    with pytest.raises(ValueError, match="'colour' is no axis; needed: one of face, law"):
        Case.parse("colour=red")
    assert {known.name for known in fields(Case)} == {*AXES, "seed"}
    assert set(AXES["law"]) == set(LAWS)


class TestTheBarsAndTheLaws:
    """They notice what is a little wrong."""

    CASE = Case(bias=True, dtype="bfloat16", recipe="dx256", sizes=(37, 256, 64, 4, 2))

    @pytest.mark.parametrize("name", ["out", "dx", "dprobs", "dw1", "dw2", "db1", "db2"])
    def test_an_expert_that_is_off_by_a_fifth(self, name, monkeypatch):
        def off(case, scene, engine="reference"):
            found = run(case, scene, engine)
            found[name] = found[name] * 1.25
            return found

        monkeypatch.setattr("oracle.laws.run", off)
        assert any(words.startswith(f"{name} is off") for words in broken(self.CASE))

    # Under Paddle no other face takes this case, and no switch fills memory.
    @pytest.mark.parametrize(
        "law", sorted({*LAWS} - {"nonfinite"} - ({"face", "memory"} if IS_PADDLE else set()))
    )
    def test_a_bit_that_moves_from_run_to_run(self, law, monkeypatch):
        runs = []

        def moving(case, scene, engine="reference", trial=None):
            found = run(case, scene, engine, trial)
            runs.append(case)
            found["out"][0, 0] += 1e-6 * len(runs)
            return found

        monkeypatch.setattr("oracle.laws.run", moving)
        wrong = broken(replace(self.CASE, law=law))
        assert wrong == [f"out has other bits under law {law!r}"] * (len(runs) - 1) and wrong

    @pytest.mark.parametrize(
        ("wrong_x", "words"),
        [(lambda x: x + 0 * x.mean(), "of others"), (np.nan_to_num, "is lost in out")],
    )
    def test_a_nan_that_spreads_or_is_lost(self, wrong_x, words, monkeypatch):
        def through(case, scene, engine="reference"):
            return run(case, replace(scene, x=wrong_x(scene.x)), engine)

        monkeypatch.setattr("oracle.laws.run", through)
        wrong = broken(replace(self.CASE, law="nonfinite"))
        assert any(words in one for one in wrong), wrong

    def test_a_value_where_nothing_was_routed(self, monkeypatch):
        def written(case, scene, engine="reference"):
            found = run(case, scene, engine)
            found["dw1"][2, 0, 0] = 1e-30
            return found

        monkeypatch.setattr("oracle.laws.run", written)
        wrong = broken(replace(self.CASE, routing="sentinels"))
        assert "dw1 has values where nothing was routed" in wrong

    @pytest.mark.parametrize("name", ["x", "dout", "weight 0", "beside main_grad"])
    def test_a_write_into_what_is_the_callers(self, name, monkeypatch):
        """Without a trace, as a kernel writes."""
        finish = Node.finish

        def writes(layer):
            finish(layer)
            if name == "beside main_grad":
                storage_bytes(layer.main_grads[0])[-1] = 1
                return
            (given,) = [s.tensors[name] for s in layer.snapshots if name in s.tensors]
            given.detach()[0, 0].fill_(7.0) if IS_PADDLE else given.data[0, 0].fill_(7.0)

        monkeypatch.setattr(Node, "finish", writes)
        if name == "beside main_grad" and IS_PADDLE:
            pytest.skip("Paddle shows values alone")
        with pytest.raises(AssertionError):
            broken(Case(gradients="main_grad"))


def test_the_golden_is_the_derivative_of_its_output():
    """By central differences of fp64, for every activation."""
    for activation in AXES["activation"]:
        case = Case(
            activation=activation, bias=True, adapters="both", sizes=(5, 6, 4, 3, 2), seed=1
        )
        scene = scene_of(case)
        found = golden(scene)

        def loss(scene):
            return (golden(scene)["out"] * scene.dout).sum()

        where = {
            "dx": "x",
            "dprobs": "probs",
            "dw1": "up_gate",
            "dw2": "down",
            "db1": "b1",
            "db2": "b2",
        }
        for name, field in where.items():
            held = getattr(scene, field)
            place, step = np.unravel_index(np.abs(found[name]).argmax(), held.shape), 1e-6
            moved = [held.copy(), held.copy()]
            moved[0][place], moved[1][place] = held[place] + step, held[place] - step
            high, low = (loss(replace(scene, **{field: values})) for values in moved)
            wanted = (high - low) / (2 * step)
            assert abs(found[name][place] - wanted) <= 1e-6 * abs(wanted), (activation, name)
