"""What the sections of a spec are made of: numbers with bounds, and the base class of all sections."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

# Bounds far above any real run: what lies beyond is a slip of the keyboard, and would be felt as a hang or an overflow.
Count = Annotated[int, Field(ge=1, le=1_000_000_000)]
Whole = Annotated[int, Field(ge=0, le=1_000_000_000)]
LARGEST = 1 << 24  # of one dimension of a tensor; token ids have at most three bytes
Size = Annotated[int, Field(ge=1, le=LARGEST)]
Bytes = Annotated[int, Field(ge=1, le=1 << 62)]
Seed = Annotated[int, Field(ge=0, lt=1 << 63)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
