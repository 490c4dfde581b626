"""One call of a layer of experts, whatever face it came through: `plan` says what it computes and on
which engine, `call` is its forward and its backward, `state` what the calls of a node share.
"""
