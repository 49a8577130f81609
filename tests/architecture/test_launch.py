"""The launch scripts themselves, with a Python that only writes down what it is asked to do."""

from __future__ import annotations

import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from npu_vlrl.cli import main
from tests.launch.checkout import ROOT, Checkout


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def fresh_folder(line: str) -> str:
    found = re.search(r"--run-dir (\S+)", line)
    assert found is not None, line
    return found[1]


def test_the_first_start_sets_up_makes_data_and_trains(checkout: Checkout) -> None:
    code, asked, said, _ = checkout.run("train_cpu.sh", "train.steps=3")
    assert code == 7  # the exit code of the training is that of the script
    assert asked[:3] == [
        "-m venv --clear .venv",
        "-m pip install -qq --disable-pip-version-check -r requirements-cpu.txt",
        "-m pip install -qq --disable-pip-version-check --no-deps -e .",
    ]
    folder = fresh_folder(asked[3])
    assert re.fullmatch(r"runs/photo_tiny-\d{8}-\d{6}", folder)
    words = f"--config configs/photo_tiny.yaml --run-dir {folder} train.steps=3"
    data = "-m npu_vlrl data geo3k --out runs/data/geo3k"
    assert asked[3:] == [f"-m npu_vlrl config {words}", data, f"-m npu_vlrl train {words}"]
    assert "setting up .venv" in said
    assert f"bash launch/train_cpu.sh --run-dir {folder} train.steps=3 run.if_exists=resume" in said


def test_the_second_start_only_trains(checkout: Checkout) -> None:
    checkout.run("train_cpu.sh")
    _, asked, *_ = checkout.run("train_cpu.sh")
    words = "--config configs/photo_tiny.yaml"
    asked = [line.split(" --run-dir")[0] for line in asked]
    assert asked == [f"-m npu_vlrl config {words}", f"-m npu_vlrl train {words}"]


@pytest.mark.parametrize("changed", ["requirements-cpu.txt", "pyproject.toml"])
def test_changed_requirements_set_up_again(checkout: Checkout, changed: str) -> None:
    checkout.run("train_cpu.sh")
    with (checkout.root / changed).open("a") as file:
        file.write("# changed\n")
    _, asked, *_ = checkout.run("train_cpu.sh")
    assert asked[0] == "-m venv --clear .venv"


def test_a_moved_checkout_sets_up_again(checkout: Checkout) -> None:
    checkout.run("train_cpu.sh")
    checkout.root = checkout.root.rename(checkout.root.with_name("moved"))
    _, asked, *_ = checkout.run("train_cpu.sh")
    assert asked[0] == "-m venv --clear .venv"


def test_an_interrupted_set_up_starts_afresh(checkout: Checkout) -> None:
    (checkout.root / "offline").touch()
    code, asked, *_ = checkout.run("train_cpu.sh")
    assert code != 0 and asked[-1].endswith("-r requirements-cpu.txt")  # neither the project nor a training followed
    (checkout.root / "offline").unlink()
    code, asked, *_ = checkout.run("train_cpu.sh")
    assert code == 7 and asked[0] == "-m venv --clear .venv"


def test_two_scripts_at_once_set_up_once(checkout: Checkout) -> None:
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(checkout.run, "train_cpu.sh", PIP_SECONDS="0.4") for _ in range(2)]
    assert [run.result()[0] for run in both] == [7, 7]
    said = "".join(run.result()[2] for run in both)
    assert said.count("setting up .venv") == 1


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["--config", "configs/geo3k_tiny.yaml"], "geo3k_tiny"),
        (["train.steps=1", "--config=elsewhere/mine.yaml"], "mine"),
        (["--config", "tasks/a.yaml", "--config", "models/b.yaml"], "a"),
    ],
)
def test_the_new_folder_is_named_after_the_configuration(checkout: Checkout, arguments: list[str], name: str) -> None:
    _, asked, *_ = checkout.run("train_cpu.sh", *arguments)
    assert re.fullmatch(rf"runs/{name}-\d{{8}}-\d{{6}}", fresh_folder(asked[-1]))
    assert asked[-1].endswith(" ".join(arguments))


@pytest.mark.parametrize("words", [["--run-dir", "x"], ["--run-dir=x"], ["run.dir=x", "run.if_exists=resume"]])
def test_a_named_folder_is_left_alone(checkout: Checkout, words: list[str]) -> None:
    _, asked, *_ = checkout.run("train_cpu.sh", *words)
    assert asked[-1] == " ".join(["-m npu_vlrl train --config configs/photo_tiny.yaml", *words])


def test_an_unsuitable_python_is_named(checkout: Checkout, tmp_path: Path) -> None:
    found = {tool: shutil.which(tool) for tool in ("bash", "cat", "cksum", "head", "dirname", "mkdir")}
    for tool, path in found.items():
        assert path is not None
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / tool).symlink_to(path)
    shutil.copy(checkout.python, tmp_path / "bin" / "python3")
    code, asked, said, _ = checkout.run("train_cpu.sh", PYTHON_UNSUITABLE="1", PATH=str(tmp_path / "bin"))
    assert (code, asked) == (2, [])
    assert said.startswith("train_cpu.sh: Python 3.11 or 3.12 with its venv module is needed, and Python 3.11.99 is")
    assert "PYTHON=/path/to/python3.11" in said


def test_training_on_a_gpu_needs_one(checkout: Checkout) -> None:
    checkout.program("nvidia-smi", "#!/bin/sh\necho No devices were found\n")
    code, asked, said, _ = checkout.run("train_gpu.sh")
    assert (code, asked) == (2, [])
    assert said == (
        "train_gpu.sh: no NVIDIA GPU found (nvidia-smi lists none); install its driver, or train with "
        "launch/train_cpu.sh\n"
    )
    checkout.program("nvidia-smi", "#!/bin/sh\necho 'GPU 0: one of them'\n")
    code, asked, *_ = checkout.run("train_gpu.sh", "train.steps=1")
    assert code == 7 and asked[:2] == [
        "-m venv --clear .venv-gpu",
        "-m pip install -qq --disable-pip-version-check -r requirements-gpu.txt",
    ]


def test_chosen_tests_run_without_the_checks(checkout: Checkout) -> None:
    _, asked, *_ = checkout.run("test.sh", "tests/data", "-q")
    assert asked[3:] == [
        "-m pip install -qq --disable-pip-version-check -r requirements-dev.txt",
        "-m pip install -qq --disable-pip-version-check -r requirements-test-data.txt --no-deps",
        "-m pip install -qq --disable-pip-version-check -r requirements-ray.txt",
        "-m pytest tests/data -q",
    ]
    _, asked, *_ = checkout.run("test.sh")
    assert [" ".join(line.split()[1:3]) for line in asked] == ["ruff check", "ruff format", "mypy", "pytest -q"]
    assert asked[-1].endswith("-m pytest -q -n 2 --dist loadfile --no-loadscope-reorder")


def test_the_inner_loop_chooses_tests_and_takes_more_arguments(checkout: Checkout) -> None:
    _, asked, *_ = checkout.run("test.sh", "--fast", "-x")
    assert [" ".join(line.split()[1:3]) for line in asked[-3:]] == ["ruff check", "ruff format", "pytest -q"]
    assert asked[-1].endswith("tests/alignment -k not alignment or qwen2_5_vl -x")


def test_the_sinks_have_a_folder_of_their_own_packages(checkout: Checkout) -> None:
    _, asked, *_ = checkout.run("test.sh", "--sinks", "-x")
    assert asked[0] == "-m venv --clear .venv"
    assert asked[-2:] == [
        "-m pip install -qq --disable-pip-version-check -r requirements-sinks.txt --upgrade --target .venv/sinks",
        "-m pytest tests/sinks -q -x",
    ]


@pytest.mark.parametrize(
    ("switch", "environment", "requirements", "tests"),
    [
        (["--npu"], ".venv-npu", "requirements-npu.txt", "tests/npu -q -n 2"),
        (["--vllm-ascend"], ".venv-npu", "requirements-npu.txt", "tests/vllm_ascend -q -n 2 --dist loadfile"),
        (["--npu-packages"], ".venv-npu", "requirements-npu.txt", "-q -n 2"),
        (["--triton"], ".venv-triton", "requirements-triton.txt", "tests/triton -q"),
        (["--vllm"], ".venv-vllm", "requirements-vllm-cpu.txt", "tests/vllm -q"),
    ],
)
def test_other_tests_have_an_environment_of_their_own(
    checkout: Checkout, switch: list[str], environment: str, requirements: str, tests: str
) -> None:
    _, asked, *_ = checkout.run("test.sh", *switch, "-x")
    assert asked[0] == f"-m venv --clear {environment}"
    assert asked[1].endswith(f"-r {requirements}")
    assert asked[-1] == f"-m pytest {tests} -x"


def test_exports_are_made_in_one_environment_and_read_in_another(checkout: Checkout) -> None:
    _, asked, *_ = checkout.run("test.sh", "--transformers4", "-x")
    made = [line for line in asked if line.startswith("-m venv")]
    assert made == ["-m venv --clear .venv", "-m venv --clear .venv-transformers4"]
    assert any(line.endswith("-r requirements-transformers4.txt") for line in asked)
    assert asked[-1] == "-m pytest tests/transformers4 -q -x"


def test_tests_in_a_browser_take_the_chromium_that_is_there(checkout: Checkout) -> None:
    checkout.program("id", "#!/bin/sh\necho 1000\n")
    checkout.program("chromium", "#!/bin/sh\n")
    code, asked, *_ = checkout.run("test.sh", "--browser", "-x")
    assert code == 0 and asked[0] == "-m venv --clear .venv" and asked[-1] == "-m pytest tests/browser -q -x"
    assert asked[-2] == "-m pip install -qq --disable-pip-version-check -r requirements-browser.txt"


def test_without_a_chromium_the_message_says_what_to_install(checkout: Checkout, tmp_path: Path) -> None:
    here = tmp_path / "bin"
    here.mkdir()
    tools = "bash cat cksum head dirname cp ls mkdir rm sleep touch env"
    for tool in tools.split():
        path = shutil.which(tool)
        assert path is not None
        (here / tool).symlink_to(path)
    checkout.program("id", "#!/bin/sh\necho 1000\n")
    code, asked, said, _ = checkout.run("test.sh", "--browser", PATH=f"{checkout.tools}:{here}")
    assert code == 2 and not any("pytest" in line for line in asked)
    assert said.splitlines()[-1].startswith("test.sh: there is no Chromium for the tests of the page; install one")


def test_a_triton_that_torch_brought_gives_way(checkout: Checkout) -> None:
    checkout.run("test.sh", "--triton")
    (checkout.root / ".venv-triton" / "bin" / "packages" / "triton==3.5.0").touch()
    _, asked, *_ = checkout.run("test.sh", "--triton")
    assert asked == [
        "-m pip uninstall -qq --yes triton",
        "-m pip install -qq --disable-pip-version-check --no-deps --force-reinstall triton-ascend==3.2.0",
        "-m pytest tests/triton -q",
    ]


def test_what_vllm_brought_for_gpus_is_removed(checkout: Checkout) -> None:
    checkout.run("test.sh", "--vllm")
    (checkout.root / ".venv-vllm" / "bin" / "packages" / "torchcodec==0.17.0").touch()
    _, asked, *_ = checkout.run("test.sh", "--vllm")
    assert asked == ["-m pip uninstall -qq --yes torchcodec", "-m pytest tests/vllm -q"]


@pytest.mark.parametrize("words", [["--run-dir", "b"], ["run.dir=b"]])
def test_the_last_folder_wins(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The scripts put their own `--run-dir` first and rely on this."""
    config = str(ROOT / "configs" / "geo3k_tiny.yaml")
    assert main(["config", "--run-dir", "a", "--config", config, *words]) == 0
    assert "  dir: b\n" in capsys.readouterr().out


def test_the_site_of_documents_has_an_environment_of_its_own(checkout: Checkout) -> None:
    _, asked, *_ = checkout.run("test.sh", "--docs")
    assert asked[0] == "-m venv --clear .venv-docs"
    assert asked[1].endswith("-r requirements-docs.txt")
    assert asked[-1] == "-m mkdocs build"
