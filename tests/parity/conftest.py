import pytest
import torch

from segue.model.spec import Llama3Scaling, ModelSpec

SHAPE = {
    "vocab_size": 320,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_layers": 3,
    "num_heads": 6,
    "num_kv_heads": 2,
    "head_dim": 16,
    "max_positions": 512,
    "rms_eps": 1e-5,
    "rope_theta": 10_000.0,
}


def family(name: str) -> ModelSpec:
    """A small model of each family, with whatever makes that family different."""
    base = {**SHAPE, "windows": (None,) * 3}
    differences = {
        "llama": {"tie_embeddings": True},
        "llama3": {"rope_theta": 500_000.0, "rope_scaling": Llama3Scaling(8.0, 1.0, 4.0, 64)},
        "mistral": {"windows": (24,) * 3},
        "qwen2": {"qkv_bias": True, "head_dim": 16, "tie_embeddings": True},
        "qwen3": {"qk_norm": True, "head_dim": 32, "num_heads": 4},
    }
    return ModelSpec(architecture="llama" if name == "llama3" else name, **{**base, **differences[name]})


FAMILIES = ["llama", "llama3", "mistral", "qwen2", "qwen3"]


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
