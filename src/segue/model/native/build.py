"""Compiles the kernels once per machine and keeps the result in a cache folder.

The file's name is a hash of everything that could change the machine code: sources, flags, the compiler's version and
the processor. A stale file is therefore never loaded, and nothing has to be invalidated.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch  # noqa: F401  - first: the kernels' OpenMP runtime must resolve to the one torch has loaded

SOURCES = Path(__file__).parent
# No -ffast-math: NaN and infinity keep their meaning, and sums keep their order. Contraction is always on, because
# kernels for different row counts must round alike.
FLAGS = (
    *("-O3", "-march=native", "-std=c++17", "-fopenmp", "-shared", "-fPIC"),
    *("-ffp-contract=fast", "-fno-math-errno", "-fvisibility=hidden"),
)
COMPILE_TIMEOUT_SECONDS = 300


class NativeUnavailable(Exception):
    """The kernels cannot be built or loaded here; `reason` is one readable paragraph. Plain torch still works."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def library(cache_dir: Path, compiler: str | None = None) -> Path:
    """The compiled library, built if it is not in the cache. Processes may race: each renames a finished file."""
    command = _compiler(compiler)
    target = cache_dir / f"kernels-{_key(command)}.so"
    if not target.exists():
        _compile(command, target)
    return target


def open_library(path: Path) -> tuple[ctypes.CDLL, ctypes.PyDLL]:
    """The same library twice: calls through the first let other Python threads run, calls through the second do not.

    A kernel of a few microseconds should keep the lock: giving it up can cost a whole switch interval to get it back.
    """
    try:
        return ctypes.CDLL(str(path)), ctypes.PyDLL(str(path))
    except OSError as error:
        raise NativeUnavailable(f"{path.name} does not load: {error}") from error


def _compiler(wanted: str | None) -> str:
    names = [wanted] if wanted else ["g++", "c++", "clang++"]
    for name in names:
        if found := shutil.which(name):
            return found
    raise NativeUnavailable(f"no C++ compiler found (looked for {', '.join(names)})")


def _key(compiler: str) -> str:
    digest = hashlib.sha256()
    for part in (*_source_bytes(), " ".join(FLAGS).encode(), _version(compiler).encode(), _processor().encode()):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:20]


def _source_bytes() -> list[bytes]:
    return [path.read_bytes() for path in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")])]


def _version(compiler: str) -> str:
    return _run([compiler, "--version"], "says no version").stdout


def _processor() -> str:
    """What -march=native looks at. Only the first processor's entry: they are alike."""
    try:
        entry = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    kept = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    return "\n".join(line for line in entry.splitlines() if line.startswith(kept))


def _compile(compiler: str, target: Path) -> None:
    sources = [str(path) for path in sorted(SOURCES.glob("*.cpp"))]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix="building-") as folder:
            built = Path(folder) / target.name
            _run([compiler, *FLAGS, *sources, "-o", str(built)], "failed to compile the kernels")
            os.replace(built, target)
    except OSError as error:
        raise NativeUnavailable(f"the kernels cannot be written to {target.parent}: {error}") from error


def _run(command: list[str], complaint: str) -> subprocess.CompletedProcess[str]:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailable(f"{command[0]} {complaint}: {error}") from error
    if done.returncode != 0:
        first_lines = "\n".join(done.stderr.strip().splitlines()[:5])
        raise NativeUnavailable(f"{command[0]} {complaint} (exit {done.returncode}):\n{first_lines}")
    return done
