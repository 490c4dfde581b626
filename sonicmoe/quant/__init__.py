"""Block-scaled 8-bit formats: `recipes` (what is quantised how), `format` (the type), `reference`
(the exact quantiser).
"""
