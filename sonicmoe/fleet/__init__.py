"""PaddleFleet's side of tokens in FP8: the quantiser that it calls on the sender (`quantizer`),
the int32 words in which scales travel (`carrier`), and gradients that come back so
(`combine_grad`).
"""
