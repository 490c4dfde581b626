"""PaddleFleet's face; docs/design.md, "The tree", says what is where."""
