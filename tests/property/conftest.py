import pytest
import torch

from segue.base.config import Environment
from segue.model import native
from segue.model.loading import open_model


@pytest.fixture(scope="module")
def model():
    """`tiny`, computed by the kernels, whose answers are the same bit for bit however a sequence is cut."""
    environment = Environment.read()
    try:
        native.load(environment.cache_dir / "kernels", environment.compiler)
    except native.NativeUnavailable as error:
        pytest.skip(str(error))
    threads = torch.get_num_threads()
    yield open_model("tiny", environment.cache_dir)
    torch.set_num_threads(threads)
