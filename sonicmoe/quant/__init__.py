"""Block-scaled 8-bit formats: `recipes` (the blocks of every operand), `format` (the type),
`reference` (the exact quantiser), `gpu` (the same by kernels), `tokens` (those that arrive in FP8).
"""
