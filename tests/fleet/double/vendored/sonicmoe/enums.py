from enum import StrEnum


class ActivationType(StrEnum):
    """What Fleet's side names."""

    SWIGLU = "swiglu"
    SITU_GLU = "situ_glu"
