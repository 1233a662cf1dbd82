"""What `ckpt.policy` offers, what it costs to import, and that its guide tells the truth."""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ckpt import policy

GUIDE = Path(__file__).parents[2] / "docs/guides/intervals.md"


def test_each_name_is_there_and_says_what_it_is():
    assert policy.__all__ == sorted(policy.__all__)
    assert dir(policy) == policy.__all__
    for name in policy.__all__:
        assert getattr(policy, name).__name__ == name
        assert getattr(policy, name).__doc__
    with pytest.raises(AttributeError, match="nonsense"):
        _ = policy.nonsense


def test_importing_all_of_it_loads_neither_torch_nor_numpy():
    code = "import sys; from ckpt.policy import *; print(young, sorted({'torch', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("> []")


def test_the_values_are_loaded_without_the_formulas():
    code = (
        "import sys, ckpt.policy.save_options; print([name for name in sys.modules if name.startswith('ckpt.policy')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['ckpt.policy', 'ckpt.policy.save_options']"


def test_the_guide_prints_what_it_says():
    blocks = re.findall(r"```(\w*)\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    names: dict[str, object] = {}
    for (kind, source), (after, said) in zip(blocks[::2], blocks[1::2], strict=True):
        assert (kind, after) == ("python", "")
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(source, GUIDE.name, "exec"), names)
        assert printed.getvalue() == said


def test_the_guide_names_every_function():
    text = GUIDE.read_text()
    missing = [name for name in policy.__all__ if name[0].islower() and f"`{name}`" not in text]
    assert missing == ["snapshots_per_commit"]
