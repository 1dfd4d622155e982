"""prfaas.json: what a ready model directory says of itself."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from prfaas.errors import ConfigError

FILE_NAME = "prfaas.json"
FORMAT_VERSION = 1
"""Goes up when ready directories must be made again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The identity of a model's weights and where they came from."""

    model_fingerprint: str
    """Of the weights, hexadecimal; see prfaas.models.weights."""
    source: Mapping[str, object]
    """"kind" ("gguf", "directory" or "hub") and what identifies it."""


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write prfaas.json, the last file of a ready directory."""
    fields = {
        "format_version": FORMAT_VERSION,
        "model_fingerprint": manifest.model_fingerprint,
        "source": manifest.source,
    }
    (directory / FILE_NAME).write_text(json.dumps(fields, indent=2) + "\n")


def read_manifest(directory: Path) -> Manifest | None:
    """Return the manifest of a directory, or None if it has none of this format.

    Raises:
        ConfigError: there is one and it is damaged.
    """
    path = directory / FILE_NAME
    try:
        fields = json.loads(path.read_bytes())
        if fields["format_version"] != FORMAT_VERSION:
            return None
        return Manifest(
            model_fingerprint=str(fields["model_fingerprint"]), source=dict(fields["source"])
        )
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is damaged, remove it: {error!r}") from error
