"""What requests may hold. Numbers are bounded: nothing past 64 bits reaches numpy, and NaN is no number here."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, FailFast, Field

_PLACE = 1 << 48  # more voxels than any volume has
Place = Annotated[int, Field(strict=True, ge=0, lt=_PLACE)]
Length = Annotated[int, Field(strict=True, ge=1, lt=_PLACE)]
Class = Annotated[int, Field(strict=True, ge=-1, lt=256)]
Name = Annotated[str, Field(max_length=500)]
Names = Annotated[list[Name], FailFast(), Field(max_length=100_000)]


class Save(BaseModel):
    """Runs (start, length, class or -1) drawn on `version`."""

    version: str = Field(max_length=100)
    runs: Annotated[list[tuple[Place, Length, Class]], FailFast(), Field(max_length=2_000_000)]
    what: Literal["strokes", "undo", "redo", "clear", "accept", "between", "merge"] = "strokes"
    client: str = Field("", max_length=64)


class Restore(BaseModel):
    version: str = Field(max_length=100)
    id: str = Field(max_length=60)
    client: str = Field("", max_length=64)


class Train(BaseModel):
    method: str = Field("pclmix", max_length=60)
    recipe: str = Field("plan", max_length=60)
    minutes: Annotated[float, Field(gt=0, le=10_000, allow_inf_nan=False)] | None = None
    then: Names = Field(default_factory=list)


class Predict(BaseModel):
    run: str = Field(max_length=40)
    cases: Annotated[Names, Field(min_length=1)]


class Resume(BaseModel):
    id: str = Field(max_length=40)
