"""Rules about the source that a reader relies on: who imports whom, who names a vendor, what never loads code."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import npu_vlrl
from npu_vlrl.model.families import FAMILIES

PACKAGE = Path(npu_vlrl.__file__).parent

ROOMS = [
    *("types", "common", "algorithms", "config", "hardware", "kernels", "data", "model", "network", "sync", "engines"),
    *("workflow", "tasks", "rollout", "learner", "report", "export", "estimate", "cluster", "training", "acceptance"),
    *("preview", "train_loop", "commands", "cli", "__main__", "__init__"),
]
"""A room imports itself and earlier ones."""

ONLY: dict[str, set[str]] = {
    **{"types": set(), "common": {"types"}, "algorithms": {"types", "common"}},
    "config": {"types", "common", "algorithms"},
}
"""Rooms that may not even import all earlier ones."""

VENDOR_ROOMS = ("hardware", "kernels")
VENDOR = re.compile(r"(cuda|npu|nccl|hccl|torch_npu|torch\.cuda|torch\.npu)([:,.].*)?", re.IGNORECASE | re.DOTALL)

FAMILY_ROOMS = ("model/families/", "kernels/")
OF_A_FAMILY = {"visual", "language_model", "vision_tower", "multi_modal_projector", "deepstack_visual_embeds"}
"""Modules and arguments of single families in transformers."""

PICKLES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
UNSAFE_ATTRIBUTES = {
    ("torch", "load"),
    ("yaml", "load"),
    ("yaml", "load_all"),
    ("yaml", "full_load"),
    ("yaml", "unsafe_load"),
    ("yaml", "UnsafeLoader"),
}
UNSAFE_CALLS = {"eval", "exec", "compile", "__import__"}
UNSAFE_KEYWORDS = {"trust_remote_code", "allow_pickle"}

OPENINGS = ("Of ", "Those ", "What ", "How ")
"""Beginnings of docstrings that can only be read together with the name beside them."""

MAX_LINES = 400
LONGER = {"types.py": 580}
"""The vocabulary of the whole system stays in one file."""

Rule = Callable[[Path], Iterator[str]]


def sources(package: Path) -> Iterator[tuple[str, str, ast.Module]]:
    """(path inside the package, dotted name of its package, syntax tree) of every file."""
    for file in sorted(package.rglob("*.py")):
        inside = file.relative_to(package)
        yield inside.as_posix(), ".".join(("npu_vlrl", *inside.parts[:-1])), ast.parse(file.read_text())


def room(path: str) -> str:
    return path.removesuffix(".py").split("/")[0].split(".")[0]


def imported(tree: ast.AST, package: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of all that a file imports, wherever in the file; relative names are made absolute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                base = ".".join([*parents[: len(parents) - node.level + 1], *filter(None, [base])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def reached(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of what is reached through the bare package, as in `npu_vlrl.config.Config`."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="npu_vlrl"), attr=name) if not name.startswith("__"):
                yield node.lineno, f"npu_vlrl.{name}"


def wrong_direction(package: Path) -> Iterator[str]:
    for path, name, tree in sources(package):
        own = room(path)
        if own not in ROOMS:
            yield f"{path}: {own} is no room; put the file into one, or give the room a place in the order"
            continue
        allowed = ONLY[own] if own in ONLY else set(ROOMS[: ROOMS.index(own)])
        for line, target in (*imported(tree, name), *reached(tree)):
            parts = target.split(".")
            if parts[0] != "npu_vlrl" or target in ("npu_vlrl", "npu_vlrl.__version__"):
                continue
            if parts[1] not in allowed | {own}:
                yield f"{path}:{line}: {own} imports {target}"


def vendor_names(package: Path) -> Iterator[str]:
    for path, name, tree in sources(package):
        if room(path) in VENDOR_ROOMS:
            continue
        prose = set(docstrings(tree))
        for line, target in imported(tree, name):
            if any(VENDOR.fullmatch(part) for part in target.split(".")):
                yield f"{path}:{line}: import of {target}"
        for node in ast.walk(tree):
            match node:
                case ast.Constant(value=str(text)) if node not in prose and VENDOR.fullmatch(text.strip()):
                    yield f"{path}:{node.lineno}: {text!r}"
                case ast.Attribute(attr=word) | ast.Name(id=word) if VENDOR.fullmatch(word):
                    yield f"{path}:{node.lineno}: the name {word}"


def names_of_families(package: Path) -> Iterator[str]:
    """Nobody but a family knows its model type, or what its modules are called."""
    for path, _, tree in sources(package):
        if path.startswith(FAMILY_ROOMS):
            continue
        for node in ast.walk(tree):
            match node:
                case ast.Attribute(attr=word) if word in OF_A_FAMILY:
                    yield f"{path}:{node.lineno}: the name {word}"
                case ast.Compare() | ast.Subscript() | ast.Call(func=ast.Name(id="getattr" | "hasattr")):
                    texts = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
                    known = [text for text in texts if text in OF_A_FAMILY or text in FAMILIES]
                    yield from (f"{path}:{node.lineno}: {text!r}" for text in known)


def docstrings(tree: ast.AST) -> Iterator[ast.Constant]:
    """Strings that stand alone as statements: docstrings of modules, classes, functions and fields."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield node.value


def docstrings_beside_names(package: Path) -> Iterator[str]:
    for path, _, tree in sources(package):
        for text in docstrings(tree):
            if isinstance(text.value, str) and text.value.lstrip().startswith(OPENINGS):
                yield f"{path}:{text.lineno}: {' '.join(text.value.split()[:4])}"


def code_from_data(package: Path) -> Iterator[str]:
    for path, name, tree in sources(package):
        for line, target in imported(tree, name):
            module, _, last = target.rpartition(".")
            if PICKLES & {module.split(".")[0], target.split(".")[0]} or (module, last) in UNSAFE_ATTRIBUTES:
                yield f"{path}:{line}: import of {target}"
        tensors_only = {node.func for node in ast.walk(tree) if isinstance(node, ast.Call) and is_tensors_only(node)}
        for node in ast.walk(tree):
            if node in tensors_only:
                continue
            match node:
                case ast.Attribute(value=ast.Name(id=base), attr=last) if (base, last) in UNSAFE_ATTRIBUTES:
                    yield f"{path}:{node.lineno}: {base}.{last}"
                case ast.Attribute(attr="read_pickle"):
                    yield f"{path}:{node.lineno}: read_pickle"
                case ast.Call(func=ast.Name(id=called)) if called in UNSAFE_CALLS:
                    yield f"{path}:{node.lineno}: {called}()"
                case ast.keyword(arg=str(word)) if word in UNSAFE_KEYWORDS:
                    yield f"{path}:{node.value.lineno}: {word}"


def code_of_a_folder(package: Path) -> Iterator[str]:
    """transformers asks on the terminal whether it may run a folder's code, unless it is told that it may not."""
    for path, _, tree in sources(package):
        for node in ast.walk(tree):
            match node:
                case ast.Call(func=ast.Attribute(attr="from_pretrained"), keywords=given):
                    unpacked = [
                        word.value.id for word in given if word.arg is None and isinstance(word.value, ast.Name)
                    ]
                    if "NO_CODE" not in unpacked:
                        yield f"{path}:{node.lineno}: from_pretrained without **NO_CODE"


def is_tensors_only(call: ast.Call) -> bool:
    """`torch.load` that refuses all but tensors and plain containers, and says so where it is called."""
    match call.func:
        case ast.Attribute(value=ast.Name(id="torch"), attr="load"):
            given = {word.arg: word.value for word in call.keywords}
            return isinstance(flag := given.get("weights_only"), ast.Constant) and flag.value is True
    return False


def too_long(package: Path) -> Iterator[str]:
    for file in sorted(package.rglob("*.py")):
        lines, path = len(file.read_text().splitlines()), file.relative_to(package).as_posix()
        if lines > LONGER.get(path, MAX_LINES):
            yield f"{path}: {lines} lines"


RULES: list[Rule] = [
    *(wrong_direction, vendor_names, code_from_data, code_of_a_folder, too_long, names_of_families),
    docstrings_beside_names,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.__name__)
def test_the_project_keeps_the_rule(rule: Rule) -> None:
    assert len(list(sources(PACKAGE))) > 50  # the rules do look at the project
    assert list(rule(PACKAGE)) == []


def test_every_room_of_the_order_exists() -> None:
    assert [name for name in ROOMS if not (PACKAGE / name).is_dir() and not (PACKAGE / f"{name}.py").is_file()] == []


BROKEN: list[tuple[Rule, str, str, str]] = [
    (
        wrong_direction,
        "types.py",
        "from npu_vlrl.config import Config",
        "types.py:1: types imports npu_vlrl.config.Config",
    ),
    (wrong_direction, "config.py", "import npu_vlrl.hardware", "config.py:1: config imports npu_vlrl.hardware"),
    (
        wrong_direction,
        "rollout/engine.py",
        "x = 1\ndef f():\n    from npu_vlrl.learner import pack",
        "rollout/engine.py:3: rollout imports npu_vlrl.learner.pack",
    ),
    (
        wrong_direction,
        "data/deep/source.py",
        "from ...workflow import render",
        "data/deep/source.py:1: data imports npu_vlrl.workflow.render",
    ),
    (
        wrong_direction,
        "workflow/x.py",
        "from npu_vlrl import rollout",
        "workflow/x.py:1: workflow imports npu_vlrl.rollout",
    ),
    (
        wrong_direction,
        "learner/x.py",
        "from npu_vlrl.train_loop import train",
        "learner/x.py:1: learner imports npu_vlrl.train_loop.train",
    ),
    (
        wrong_direction,
        "model/x.py",
        "import npu_vlrl\nnpu_vlrl.learner.pack.split([], 1)",
        "model/x.py:2: model imports npu_vlrl.learner",
    ),
    (
        wrong_direction,
        "evaluate.py",
        "import torch",
        "evaluate.py: evaluate is no room; put the file into one, or give the room a place in the order",
    ),
    (
        wrong_direction,
        "training/x.py",
        "from npu_vlrl.commands import options",
        "training/x.py:1: training imports npu_vlrl.commands.options",
    ),
    (vendor_names, "learner/x.py", 'device = "cuda"', "learner/x.py:1: 'cuda'"),
    (vendor_names, "learner/x.py", 'device = f"npu:{rank}"', "learner/x.py:1: 'npu:'"),
    (vendor_names, "train.py", 'backend = "cpu:gloo"\nother = "hccl"', "train.py:2: 'hccl'"),
    (vendor_names, "model/x.py", "import torch\ntorch.cuda.synchronize()", "model/x.py:2: the name cuda"),
    (vendor_names, "model/x.py", "y = x.npu()", "model/x.py:1: the name npu"),
    (vendor_names, "model/x.py", "import torch_npu", "model/x.py:1: import of torch_npu"),
    (vendor_names, "model/x.py", "from torch import cuda", "model/x.py:1: import of torch.cuda"),
    (code_from_data, "x.py", "import torch\ntorch.load('a')", "x.py:2: torch.load"),
    (code_from_data, "x.py", "import torch\ntorch.load('a', weights_only=safe)", "x.py:2: torch.load"),
    (code_from_data, "x.py", "import torch\nload = torch.load", "x.py:2: torch.load"),
    (code_from_data, "x.py", "from torch import load", "x.py:1: import of torch.load"),
    (code_from_data, "x.py", "from pickle import loads", "x.py:1: import of pickle.loads"),
    (code_from_data, "x.py", "import cloudpickle", "x.py:1: import of cloudpickle"),
    (code_from_data, "x.py", "import yaml\nyaml.load(text)", "x.py:2: yaml.load"),
    (code_from_data, "x.py", "eval('1')", "x.py:1: eval()"),
    (code_from_data, "x.py", "load(folder, trust_remote_code=True)", "x.py:1: trust_remote_code"),
    (code_from_data, "x.py", "np.load(file, allow_pickle=True)", "x.py:1: allow_pickle"),
    (
        code_of_a_folder,
        "x.py",
        "AutoTokenizer.from_pretrained(folder, **other)",
        "x.py:1: from_pretrained without **NO_CODE",
    ),
    (too_long, "data/x.py", "\n" * 401, "data/x.py: 401 lines"),
    (docstrings_beside_names, "types.py", '"""Those of a run."""', "types.py:1: Those of a run."),
    (docstrings_beside_names, "sync/x.py", 'class A:\n    """How it is sent."""', "sync/x.py:2: How it is sent."),
    (
        docstrings_beside_names,
        "model/families/x.py",
        'def f():\n    """\n    What it is, and no more.\n    """',
        "model/families/x.py:2: What it is, and",
    ),
    (docstrings_beside_names, "learner/x.py", 'SIZE = 2\n"""Of a row."""', "learner/x.py:2: Of a row."),
    (
        docstrings_beside_names,
        "rollout/x.py",
        'class A:\n    size: int\n    """Of a row, bytes."""',
        "rollout/x.py:3: Of a row, bytes.",
    ),
    (names_of_families, "learner/x.py", "model.model.visual.blocks", "learner/x.py:1: the name visual"),
    (names_of_families, "x.py", "size = 32 if kind == 'qwen3_vl' else 28", "x.py:1: 'qwen3_vl'"),
    (names_of_families, "x.py", "getattr(core, 'language_model', core)", "x.py:1: 'language_model'"),
]


@pytest.mark.parametrize(("rule", "path", "code", "message"), BROKEN, ids=[b[3] for b in BROKEN])
def test_a_broken_rule_is_reported(tmp_path: Path, rule: Rule, path: str, code: str, message: str) -> None:
    file = tmp_path / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(code)
    assert list(rule(tmp_path)) == [message]


ALLOWED: list[tuple[Rule, str, str]] = [
    (wrong_direction, "report/x.py", "from npu_vlrl import __version__"),
    (wrong_direction, "__init__.py", "from npu_vlrl.train_loop import train"),
    (wrong_direction, "data/x.py", "import npu_vlrl\nhere = npu_vlrl.__file__"),
    (
        wrong_direction,
        "learner/x.py",
        "from npu_vlrl.types import Task\nfrom npu_vlrl.learner import pack\nimport torch",
    ),
    (wrong_direction, "commands/x.py", "from npu_vlrl.train_loop import train\nfrom npu_vlrl import report"),
    (vendor_names, "hardware/x.py", 'import torch\ntorch.cuda.current_device()\nname = "nccl"'),
    (
        vendor_names,
        "learner/x.py",
        '"""cuda"""\nname = "npu_vlrl"\nprint("npu-vlrl: no")\nclass A:\n    x: int\n    """npu"""',
    ),
    (code_from_data, "x.py", "import yaml\nmodel.eval()\nyaml.safe_load(text)\nre.compile('a')"),
    (code_from_data, "x.py", "import torch\ntorch.load('a', weights_only=True)"),
    (code_of_a_folder, "x.py", "AutoTokenizer.from_pretrained(folder, dtype=x, **NO_CODE)"),
    (too_long, "data/x.py", "\n" * 400),
    (
        docstrings_beside_names,
        "learner/x.py",
        '"""Offsets of rows. How they are found:"""\nsize = "What is it?"\n...  # Of a row',
    ),
    (names_of_families, "model/families/x.py", "text = model.language_model"),
    (names_of_families, "x.py", 'path = "tiny:qwen2_5_vl"'),
]


@pytest.mark.parametrize(("rule", "path", "code"), ALLOWED)
def test_what_is_allowed_is_not_reported(tmp_path: Path, rule: Rule, path: str, code: str) -> None:
    file = tmp_path / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(code)
    assert list(rule(tmp_path)) == []


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


HEAVY = (
    "torch",
    "transformers",
    "peft",
    "ray",
    "vllm",
    "matplotlib",
    "gymnasium",
    "pyarrow",
    "PIL",
    "safetensors",
    "rich",
)


def heavy_imports(code: str) -> list[str]:
    """What of `HEAVY` a program that ends well has imported."""
    done = python(f"import sys\n{code}\nprint('heavy', *[name for name in {HEAVY} if name in sys.modules])")
    assert done.returncode == 0, done.stderr
    word, *found = done.stdout.splitlines()[-1].split()
    assert word == "heavy"
    return found


@pytest.mark.parametrize(
    "code",
    [
        "import npu_vlrl.cli, npu_vlrl.config",
        "import npu_vlrl; assert not {'numpy', 'pydantic', 'yaml'} & {*sys.modules}",
        "from npu_vlrl import Image, Trajectory, load_config; load_config('photo_tiny')",
        "from npu_vlrl.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass",
        "from npu_vlrl.cli import main\ntry: main(['train', '--help'])\nexcept SystemExit: pass",
        "from npu_vlrl.cli import main\nassert main(['config', '--config', 'photo_tiny']) == 0",
        "from npu_vlrl.cli import main\nassert main(['completion', 'bash']) == 0",
    ],
)
def test_what_only_reads_words_and_configurations_imports_nothing_heavy(code: str) -> None:
    assert heavy_imports(code) == []


def test_a_heavy_import_is_found() -> None:
    assert heavy_imports("import PIL, safetensors") == ["PIL", "safetensors"]


def test_every_module_imports_without_what_only_other_platforms_and_tests_have() -> None:
    code = """
import importlib, pkgutil, sys
for absent in ("vllm", "ray", "torch_npu", "mindspeed", "torchvision", "triton", "trl", "dashscope", "pytest",
               "tensorboard", "wandb", "swanlab", "trackio"):
    sys.modules[absent] = None  # importing it now raises ModuleNotFoundError
import npu_vlrl
names = [module.name for module in pkgutil.walk_packages(npu_vlrl.__path__, "npu_vlrl.")]
for name in names:
    # source for Triton, imported when it is first called, and sinks, imported when they are chosen
    if not name.endswith(("__main__", "triton_kernels", "_sink")):
        importlib.import_module(name)
print(len(names))
"""
    done = python(code)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 50
