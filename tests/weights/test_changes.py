"""The checksums that notice weights written behind the caches' back."""

from __future__ import annotations

import numpy as np
import pytest
from framework import numpy, parameter, torch
from weights.weight_sources import weight_arrays

from sonicmoe.weights.changes import weight_fingerprint


class TestFingerprint:
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    def test_every_single_bit_counts(self, dtype):
        dtype = getattr(torch, dtype)
        weight = parameter(np.float32(weight_arrays()[0][0]), dtype)
        before = weight_fingerprint([weight])
        for position in (0, 100, 383):
            changed = numpy(weight)
            changed.ravel()[position] *= 1 + 2.0**-6
            other = parameter(np.float32(changed), dtype)
            assert not np.array_equal(numpy(other), numpy(weight))
            assert weight_fingerprint([other]) != before
        assert weight_fingerprint([parameter(np.float32(numpy(weight)), dtype)]) == before

    def test_knows_which_parameter(self):
        a, b = (parameter(np.float32(w)) for w in weight_arrays()[1][:2])
        assert weight_fingerprint([a, b]) != weight_fingerprint([b, a])
        assert weight_fingerprint([a, b]) == (*weight_fingerprint([a]), *weight_fingerprint([b]))

    @pytest.mark.parametrize("one", [(0, 0), (3, 2)])
    @pytest.mark.parametrize("other", [(0, 5), (7, 0), (11, 15)])
    def test_an_exchange_of_two_values_shows(self, one, other):
        values = np.float32(weight_arrays()[1][0])
        before = weight_fingerprint([parameter(values)])
        values[one], values[other] = values[other], values[one]
        assert weight_fingerprint([parameter(values)]) != before

    @pytest.mark.parametrize("change", ["roll", "flip", "other triangle"])
    def test_a_permutation_shows(self, change):
        """Every row and every column keeps its sum."""
        eye = np.eye(24, dtype=np.float32)
        changed = {
            "roll": np.roll(eye, 1, 1),
            "flip": eye[::-1],
            "other triangle": eye[np.r_[2:24, 0, 1]],
        }[change]
        fingerprints = {
            weight_fingerprint([parameter(np.ascontiguousarray(w))]) for w in (eye, changed)
        }
        assert len(fingerprints) == 2

    def test_of_nothing(self):
        assert weight_fingerprint([]) == ()
