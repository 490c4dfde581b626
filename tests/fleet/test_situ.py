"""SiTU-GLU as one word."""

from __future__ import annotations

from itertools import product

import pytest

from sonicmoe.fleet.situ import encode_situ_activation, parse_situ_activation

LOW, HIGH = 1.1754943508222875e-38, 8.507059173023462e37


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ((), "situ_glu:b=4.0:lb=25.0"),
        ((4, 25), "situ_glu:b=4.0:lb=25.0"),
        ((1.0, None), "situ_glu:b=1.0:lb=none"),
        ((1.0, " Off "), "situ_glu:b=1.0:lb=none"),
        ((0.1, 1 / 3, False), "situ_glu:b=0.1:lb=0.3333333333333333:approx"),
        ((LOW, HIGH), f"situ_glu:b={LOW}:lb={HIGH}"),
    ],
)
def test_encoding(arguments, word):
    assert encode_situ_activation(*arguments) == word


def test_reading_is_the_inverse():
    for given in product((LOW, 1 / 3, HIGH), (None, 1 / 3, 25.0), (True, False)):
        numbers = dict(zip(("beta", "linear_beta"), given, strict=False))
        assert parse_situ_activation(encode_situ_activation(*given)) == numbers


@pytest.mark.parametrize(
    ("word", "numbers"),
    [
        ("situ_glu", {}),
        ("situ_glu:b=2", {"beta": 2.0}),
        ("situ_glu:lb=none:approx", {"linear_beta": None}),
        ("situ_glu:lb=NULL:precise", {"linear_beta": None}),
        ("swiglu", None),
        ("situ_glue", None),
        (None, None),
    ],
)
def test_parts_that_are_missing_stay_open(word, numbers):
    assert parse_situ_activation(word) == numbers
