"""What measurements of this machine have to name: processor, threads, versions."""

import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

CPU_INFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The machine, and what of it the engine uses."""

    device: str
    """The processor's, or the accelerator's name."""
    threads: int
    """Of the engine."""
    cores: int
    """That this process may use."""
    torch_version: str
    system: str

    @property
    def hardware(self) -> str:
        """Device and threads in a few words."""
        return f"{self.device}, {self.threads} thread{'s' if self.threads > 1 else ''}"


def this_machine(device: str) -> Machine:
    """Return what computes on a device of torch's names. Imports torch."""
    import torch

    if device == "cpu":
        name = processor_name(CPU_INFO.read_text() if CPU_INFO.exists() else "")
    else:
        name = torch.cuda.get_device_name(device)
    return Machine(
        device=name,
        threads=torch.get_num_threads(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1,
        torch_version=torch.__version__,
        system=f"{platform.system()} {platform.machine()}",
    )


def processor_name(cpu_info: str) -> str:
    """Return the processor's name in a /proc/cpuinfo, or what Python knows of it."""
    found = re.search(r"^model name\s*:\s*(\S.*)$", cpu_info, re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine() or "unknown"
