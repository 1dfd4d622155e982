"""The files of a Hugging Face checkpoint directory that are used here."""

import json
from pathlib import Path

from prfaas.errors import ConfigError
from prfaas.models.manifest import Manifest, write_manifest
from prfaas.models.progress import Progress
from prfaas.models.weights import identify_weights

IDENTITY_STAGE = "Hashing the weights"
INDEX_NAME = "model.safetensors.index.json"
REQUIRED_NAMES = ("config.json", "tokenizer.json")
OPTIONAL_NAMES = ("generation_config.json", "tokenizer_config.json", "chat_template.jinja")


def weight_files(directory: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint: those its index names, else all.

    Raises:
        ConfigError: there are none, the index is damaged, or a file that it names is missing.
    """
    index = directory / INDEX_NAME
    if not index.exists():
        found = sorted(directory.glob("*.safetensors"))
        if not found:
            raise ConfigError(f"{directory} holds no *.safetensors; other weights are not read")
        return found
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        paths = [directory / Path(name).name for name in names]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{index} is not a usable index: {error!r}") from error
    for path in paths:
        if not path.is_file():
            raise ConfigError(f"{index} names {path.name}, which is not there")
    return paths


def checkpoint_files(directory: Path) -> list[Path]:
    """Return all files that serving this checkpoint reads, prfaas.json aside.

    Raises:
        ConfigError: one that must be there is missing.
    """
    for name in REQUIRED_NAMES:
        if not (directory / name).is_file():
            raise ConfigError(f"{directory} is no Hugging Face checkpoint: it has no {name}")
    optional = [path for name in OPTIONAL_NAMES if (path := directory / name).is_file()]
    return [*(directory / name for name in REQUIRED_NAMES), *optional, *weight_files(directory)]


def identify_checkpoint(directory: Path, source: dict[str, object], progress: Progress) -> Manifest:
    """Hash the weights in a checkpoint directory and write prfaas.json into it."""
    paths = weight_files(directory)
    total = sum(path.stat().st_size for path in paths)
    fingerprint = identify_weights(paths, lambda done: progress(IDENTITY_STAGE, done, total))
    progress(IDENTITY_STAGE, total, total)
    manifest = Manifest(model_fingerprint=fingerprint, source=source)
    write_manifest(directory, manifest)
    return manifest
