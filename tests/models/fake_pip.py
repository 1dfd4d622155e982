"""A stand-in for pip: "downloads" prepared wheels by copying them; needs no network.

Usage: fake_pip.py WHEELS_DIR MODE download ... --dest DIR ...
"""

import os
import shutil
import sys
import time
from pathlib import Path


def main() -> int:
    """Do what `pip download` would, or fail as MODE says."""
    source, mode, command, *arguments = sys.argv[1:]
    assert command == "download"
    assert "--no-deps" in arguments
    destination = Path(arguments[arguments.index("--dest") + 1])
    with Path(source, "calls").open("a") as calls:
        calls.write(" ".join(arguments) + "\n")
    if mode == "fail":
        sys.stderr.write("Looking in indexes\nERROR: No matching distribution found\n")
        return 1
    if mode == "hang":
        Path(source, "pid").write_text(str(os.getpid()))
        time.sleep(3600)
    for wheel in Path(source).glob("*.whl"):
        shutil.copy(wheel, destination)
    return 0


if __name__ == "__main__":
    sys.exit(main())
