"""Nothing in Segue opens data that could run code, read from the source itself: no run would show every path."""

import ast
from pathlib import Path

import pytest

import segue

SOURCES = sorted(Path(segue.__file__).parent.rglob("*.py"))
MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
BUILTINS = {"eval", "exec"}
LOADERS = {"torch", "np", "numpy"}


def offences(source):
    """Line and name of everything in a module that could unpickle or run what it reads."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names if _root(alias.name) in MODULES]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = {alias.name for alias in node.names}
            if _root(node.module) in MODULES or (_root(node.module) in LOADERS and "load" in names):
                found.append((node.lineno, node.module))
        elif isinstance(node, ast.Call) and (name := _forbidden(node)):
            found.append((node.lineno, name))
    return found


def _root(module):
    return module.partition(".")[0]


def _forbidden(call):
    """The name of a call that is never right here; of `numpy.load` only the kind that unpickles."""
    name = ast.unparse(call.func)
    base, _, attribute = name.rpartition(".")
    if name in BUILTINS or (base == "builtins" and attribute in BUILTINS):
        return name
    if name == "__import__" or attribute == "import_module":
        words = [arg.value for arg in call.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
        return next((f"{name}({word!r})" for word in words if _root(word) in MODULES), None)
    if base == "torch" and attribute == "load":
        return name
    if base in LOADERS and attribute == "load":
        allowed = [keyword.value for keyword in call.keywords if keyword.arg in ("allow_pickle", None)]
        if any(not (isinstance(value, ast.Constant) and value.value is False) for value in allowed):
            return name
    return None


def test_there_are_sources_to_read():
    assert {"codec.py", "wire.py", "async_engine.py", "loading.py"} <= {path.name for path in SOURCES}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(Path(segue.__file__).parent)))
def test_nothing_unpickles_or_runs_what_it_reads(path):
    assert offences(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import os, shelve as s",
        "import dill.detect",
        "from marshal import loads",
        "def f():\n    from pickle import load",
        "from torch import load",
        "import importlib\nimportlib.import_module('pickle')",
        "__import__('dill')",
        "import torch\ntorch.load('weights.bin', weights_only=True)",
        "np.load(path, allow_pickle=True)",
        "numpy.load(path, **options)",
        "eval('1')",
        "import builtins\nbuiltins.exec(text)",
    ],
)
def test_what_is_forbidden_would_be_seen(source):
    assert len(offences(source)) == 1


def test_what_only_sounds_like_it_is_allowed():
    fine = "model.eval()\nnp.load(p)\nnp.load(p, allow_pickle=False)\njson.load(f)\nast.literal_eval(x)"
    assert offences(fine) == []
