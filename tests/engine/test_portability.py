"""Unlike CPUs give equal bits and equal fingerprints, as far as one machine can tell.

LLVM makes other code, of other instructions and vectors; torch and numpy take their paths for the
plainest CPUs.
"""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llvmlite import binding as llvm

from tests.tiny_configs import Family
from tests.tiny_models import write_tiny_model

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
FAMILIES: tuple[Family, ...] = ("gemma3", "qwen3_moe", "kimi_linear", "falcon_h1", "minimax")
"""Between them: windows, experts, latent attention, the delta rule, Mamba-2, lightning attention."""
NARROW = "haswell:+prefer-128-bit:"
WIDE = f"{llvm.get_host_cpu_name()}::wide"


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("models")
    return [write_tiny_model(root / family, family) for family in FAMILIES]


def computed(generator: str, model_dirs: list[Path], **environment: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-W", "ignore", "-m", "tests.engine.unlike", generator]
    run = subprocess.run(
        [*command, *map(str, model_dirs)],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    results: list[dict[str, Any]] = json.loads(run.stdout)
    return results


@pytest.fixture(scope="module")
def own(model_dirs: list[Path]) -> list[dict[str, Any]]:
    results = computed("own", model_dirs)
    assert len({result["fingerprint"] for result in results}) == len(FAMILIES)
    return results


def test_narrow_code_for_another_cpu_gives_the_same_bits(
    own: list[dict[str, Any]], model_dirs: list[Path]
) -> None:
    if platform.machine() != "x86_64":
        pytest.skip("code for x86-64 does not run here")
    assert computed(NARROW, model_dirs) == own


def test_wide_code_beside_libraries_for_the_plainest_cpu_gives_the_same_bits(
    own: list[dict[str, Any]], model_dirs: list[Path]
) -> None:
    found: list[str] = np.show_config(mode="dicts")["SIMD Extensions"]["found"]
    features = " ".join(found)
    plain = {"ATEN_CPU_CAPABILITY": "default", "NPY_DISABLE_CPU_FEATURES": features}
    assert computed(WIDE, model_dirs, **plain) == own
