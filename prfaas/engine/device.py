"""The device that a model computes on: found by name, and named in a fingerprint."""

import platform
import re

import torch

from prfaas.errors import ConfigError

DEVICE = re.compile(r"cpu|cuda(?::(\d{1,3}))?")


def find_device(name: str) -> torch.device:
    """Return the device called `name`: cpu, cuda (the first) or cuda:N.

    Raises:
        ConfigError: the name means nothing, or there is no such device.
    """
    match = DEVICE.fullmatch(name)
    if match is None:
        raise ConfigError(f"engine.device = {name!r}; it is cpu, cuda or cuda:N")
    if name == "cpu":
        return torch.device("cpu")
    index = int(match[1] or 0)
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if index >= num_devices:
        raise ConfigError(
            f"engine.device = {name!r}: torch {torch.__version__} finds {num_devices} CUDA devices"
        )
    return torch.device("cuda", index)


def device_names(device: torch.device) -> tuple[str, ...]:
    """Return names of the device and its libraries, without spaces.

    Of a CPU they decide no bits, and are not part of a fingerprint.
    """
    if device.type == "cpu":
        capability = torch.backends.cpu.get_cpu_capability()
        return f"cpu-{platform.machine()}-{capability}", f"torch-{torch.__version__}"
    major, minor = torch.cuda.get_device_capability(device)
    return (
        f"cuda-{torch.cuda.get_device_name(device).replace(' ', '-')}-sm{major}{minor}",
        f"torch-{torch.__version__}",
        f"cuda-{torch.version.cuda}",
    )
