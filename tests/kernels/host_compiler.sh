#!/bin/sh
# nvcc calls this as its host compiler. The last level of optimisation wins, and without any a source
# takes a quarter to a third less CPU time.
exec gcc "$@" -O0
