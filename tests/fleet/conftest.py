"""Tests of the double run under Paddle: `SONICMOE_TEST_FRAMEWORK=paddle`."""

from __future__ import annotations

import framework

collect_ignore_glob = [] if framework.IS_PADDLE else ["test_double*.py"]
