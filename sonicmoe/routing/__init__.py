"""Routing: indices and probabilities of dispatched tokens -> `RoutingMetadata`, under one contract
(docs/design.md, "Routing contract").
"""
