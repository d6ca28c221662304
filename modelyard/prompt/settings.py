"""Settings of images by URL."""

from __future__ import annotations

import re

from pydantic import BaseModel, ConfigDict, Field, field_validator

_HOST = re.compile(r"[\w.*?\[\]:!-]+")


class ImageSettings(BaseModel):
    model_config = ConfigDict(extra="forbid")

    allow: list[str] = Field(
        default_factory=list,
        description='Hosts (globs such as "*.example.com") that http(s) images may come from, and folders '
        '("file:///pictures/") that file images may come from. data: URLs always work.',
    )
    max_bytes: int = Field(default=20 * 1024**2, gt=0, description="Largest image, sound or PDF, decoded.")
    pdf_max_pages: int = Field(default=32, gt=0, description="Most pages of a PDF in a request.")
    pdf_pixels: int = Field(
        default=1280, ge=64, le=8192, description="Longest side of the image of a PDF's page, in pixels."
    )
    timeout_s: float = Field(default=10.0, gt=0, description="Seconds that fetching one image may take in all.")
    allow_private: bool = Field(
        default=False, description="Whether allowed hosts may resolve to private or loopback addresses."
    )

    @field_validator("allow")
    @classmethod
    def _hosts_or_folders(cls, values: list[str]) -> list[str]:
        for value in values:
            if value.startswith("file://"):
                if not (value.startswith("file:///") and value.endswith("/")):
                    raise ValueError(f"{value!r}: a folder is written file:///absolute/folder/ with a slash at its end")
            elif not _HOST.fullmatch(value):
                raise ValueError(f"{value!r} is neither a host glob such as *.example.com nor a file:///folder/")
        return values
