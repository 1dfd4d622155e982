"""Write a tiny random model of a family into a directory.

usage: scripts/tiny_model FAMILY DIR [--seed N]      scripts/tiny_model --list
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the tests' models are not installed

from tests.tiny_configs import FAMILIES


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/tiny_model",
        description="Write a tiny random model of a family, whose text means nothing.",
        epilog=f"families: {', '.join(FAMILIES)}",
    )
    parser.add_argument("family", metavar="FAMILY", nargs="?")
    parser.add_argument("directory", metavar="DIR", nargs="?", type=Path)
    parser.add_argument("--seed", type=int, default=0, help="other weights (default 0)")
    parser.add_argument("--list", action="store_true", help="print the families and stop")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(FAMILIES))
        return 0
    if arguments.family is None or arguments.directory is None:
        parser.error("FAMILY and DIR are needed")
    if arguments.family not in FAMILIES:
        parser.error(f"no family {arguments.family!r}; there are: {', '.join(FAMILIES)}")
    if arguments.seed < 0:
        parser.error(f"--seed {arguments.seed} is negative")
    directory: Path = arguments.directory
    try:
        if directory.exists() and any(directory.iterdir()):
            parser.error(f"{directory} is not empty")
        from tests.tiny_models import write_tiny_model  # torch takes its time to import

        write_tiny_model(directory, arguments.family, arguments.seed)
    except OSError as error:
        parser.error(f"cannot write {directory}: {error.strerror}")
    size = (directory / "model.safetensors").stat().st_size
    print(f"{directory}: {arguments.family}, {size:,} bytes of weights")
    return 0


if __name__ == "__main__":
    sys.exit(main())
