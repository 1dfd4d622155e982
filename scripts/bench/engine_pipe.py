"""Both ends of the pipe to a process that runs one engine and nothing else. Standard library only.

The process says in one line of JSON what it is, then answers one line with one. While it is not asked it
is stopped by a signal, so that no thread of its spins or polls while another engine is measured.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

STOP_TIMEOUT_S = 20.0


class Engine(Protocol):
    """What a process answers with; one group of sequences decodes at a time."""

    about: dict[str, Any]
    """Its name's version and settings."""

    def prefill(self, tokens: list[int]) -> None:
        """Compute a prompt and its last token's logits; keep nothing."""
        ...

    def begin(self, tokens: list[int], batch: int, num_steps: int) -> None:
        """Make sequences of these tokens, with room for so many steps; number i goes on with tokens[i]."""
        ...

    def step(self) -> None:
        """Compute each sequence's next token, and take the largest logit's for the one after."""
        ...

    def end(self) -> None:
        """Let the sequences go."""
        ...

    def logits(self, windows: list[list[int]], num_scored: int, path: str) -> None:
        """Write the logits at the last `num_scored` tokens of each window, float32 [W, S, V]."""
        ...


def serve(make: Callable[[], Engine]) -> None:
    """Answer on what was standard output, which libraries print to, until standard input ends."""
    output = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    engine = make()
    print(json.dumps(engine.about), file=output)
    for line in sys.stdin:
        ask = json.loads(line)
        run: Callable[..., None] = getattr(engine, ask["run"])
        began_s = time.perf_counter()
        for _ in range(ask["repeat"]):
            run(*ask["with"])
        print(json.dumps({"seconds": time.perf_counter() - began_s}), file=output)


class EngineProcess:
    """An engine in a process of its own; RuntimeError has what it printed when it failed."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        num_threads: int,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self._log = log
        kept = {key: value for key, value in os.environ.items() if not key.startswith("PRFAAS_")}
        kept |= {"OMP_NUM_THREADS": str(num_threads), **(environment or {})}
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                command,
                env=kept,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                process_group=0,
            )
        try:
            self.about = self._read()
        except BaseException:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self, run: str, *arguments: object, repeat: int = 1) -> None:
        """Let it go on with something; `wait` has the answer."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        ask = {"run": run, "with": arguments, "repeat": repeat}
        self._process.stdin.write(json.dumps(ask) + "\n")
        self._process.stdin.flush()

    def wait(self) -> float:
        """Return the seconds that it took, by its own clock."""
        seconds: float = self._read()["seconds"]
        self._signal(signal.SIGSTOP)
        return seconds

    def run(self, run: str, *arguments: object, repeat: int = 1) -> float:
        """Return the seconds that `repeat` calls of a method take."""
        self.start(run, *arguments, repeat=repeat)
        return self.wait()

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._signal(signal.SIGCONT)
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self._signal(signal.SIGKILL)  # and what it started
            self._process.wait()
            self._process.stdout.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            said = self._log.read_text(errors="replace").strip()[-3000:]
            raise RuntimeError(f"{self.name} ended: {said}")
        value: dict[str, Any] = json.loads(line)
        return value

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
