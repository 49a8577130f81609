"""The registry of names: each module has what its table demands, and nothing heavy comes with it."""

from __future__ import annotations

import inspect
import random
import subprocess
import sys

import pytest

from npu_vlrl.common.registry import DATA, GAMES, GENERATORS, RULES, STARTERS, load
from npu_vlrl.config import Config
from npu_vlrl.workflow.tools.forms import HERMES

CONFIG = Config.model_validate({"model": {"path": "tiny:qwen2_5_vl"}, "data": {"train": {"generator": "arrow"}}})


@pytest.mark.parametrize("name", GENERATORS)
def test_a_generator_makes_a_task_by_seed_and_index_and_demonstrates_it(name: str) -> None:
    module = load(GENERATORS, name)
    make = module.generated(CONFIG, 7, 28)
    assert [make(3).id, make(3).id] == [module.generated(CONFIG, 7, 28)(3).id] * 2 and make(3).id != make(4).id
    if name == "episodes":  # a game shows its own solutions
        assert not hasattr(module, "demonstration") and isinstance(make(3).extra["seed"], int)
    else:
        lines = list(module.demonstration(make(3), CONFIG, random.Random(0), False, HERMES))
        assert len(lines) == CONFIG.workflow.max_turns and f"<answer>{make(3).answer}</answer>" in lines


def test_modules_have_what_their_tables_demand() -> None:
    for name in RULES:
        module = load(RULES, name)
        assert callable(module.score) and (name == "python" or callable(module.check_gold)), name
    assert [name for name in RULES if getattr(load(RULES, name), "INLINE", False)] == [
        *("tagged", "rotation_broad", "rotation_strict")
    ]
    for name in GAMES:
        options = inspect.signature(load(GAMES, name).game).parameters.values()
        assert all(p.kind is p.KEYWORD_ONLY and p.annotation is not p.empty for p in options), name
    for name in DATA:
        module = load(DATA, name)
        assert module.HELP and callable(module.add) and inspect.isgeneratorfunction(module.run), name
    for name in STARTERS:
        module = load(STARTERS, name)
        assert {"run.dir", "workflow.max_turns"} <= set(module.STARTER) and hasattr(module, "PREPARE"), name


def test_the_registry_and_what_commands_read_of_it_are_light() -> None:
    code = (
        "import sys\nfrom npu_vlrl.common.registry import DATA, load\n"
        "assert not {'numpy', 'npu_vlrl.types'} & set(sys.modules)\n"
        "[load(DATA, name) for name in DATA]\n"
        "assert not {'torch', 'pyarrow', 'transformers', 'PIL'} & set(sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False).stderr == ""
