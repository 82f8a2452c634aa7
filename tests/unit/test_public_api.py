"""The public names, and the promise that everything up to the engine runs without torch."""

import subprocess
import sys

import segue


def test_the_public_names():
    assert sorted(segue.__all__) == [
        "AsyncEngine", "Beam", "BeamParams", "Catalogue", "Completion", "Delta", "Engine", "EngineClosed", "EngineConfig",
        "EngineCore", "FinishReason", "InvalidRequest", "ModelError", "Request", "Result", "SamplingParams", "SegueError",
        "SnapshotError", "State", "StateError", "StepFailed", "Stream", "Then",
    ]  # fmt: skip
    for name in segue.__all__:
        assert getattr(segue, name) is not None


def test_the_engine_runs_without_torch():
    code = (
        "import sys\n"
        "for name in ('torch', 'safetensors', 'tokenizers', 'gguf', 'jinja2', 'rich', 'numpy'): sys.modules[name] = None\n"
        "import segue, segue.kv, segue.policies\n"
        "from segue import EngineCore, EngineConfig, SamplingParams\n"
        "from tests.fakes import FakeExecutor, expected\n"
        "engine = EngineCore(FakeExecutor(64, 4), EngineConfig(64, 4))\n"
        "result = engine.generate([1, 2, 3], SamplingParams(max_tokens=5, temperature=0))[0]\n"
        "assert result.token_ids == expected([1, 2, 3], 5)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
