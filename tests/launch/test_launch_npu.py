"""launch/train_npu.sh and the processes of all three scripts, on a checkout whose Python only takes notes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch.checkout import Checkout

TORCHRUN = "-m torch.distributed.run"


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


@pytest.fixture
def host(checkout: Checkout) -> Checkout:
    """A machine with NPUs and with CANN in the home folder."""
    checkout.program("npu-smi", "#!/bin/sh\necho 'npu-smi 25.5'\n")
    cann = checkout.home / "Ascend" / "cann"
    cann.mkdir(parents=True)
    (cann / "set_env.sh").write_text("export CANN_WAS=$1here\n[ -z $NOT_SET ] && false\n")
    atb = checkout.home / "Ascend" / "nnal" / "atb"
    atb.mkdir(parents=True)
    (atb / "set_env.sh").write_text("export ATB_WAS=after-$CANN_WAS\n")
    return checkout


def test_without_an_npu_there_is_one_message(checkout: Checkout) -> None:
    ran = checkout.run("train_npu.sh", "train.steps=1")
    assert (ran.code, ran.asked, ran.shown) == (2, [], "")  # nothing was set up for nothing
    assert ran.said.startswith("train_npu.sh: no Ascend NPU found (npu-smi lists none, and there is no /dev/davinci0)")
    assert ran.said.count("\n") == 1 and "launch/train_cpu.sh" in ran.said and "NPU_VLRL_HOST_CANN=1" in ran.said


def test_without_cann_there_is_one_message(checkout: Checkout) -> None:
    checkout.program("npu-smi", "#!/bin/sh\n")
    ran = checkout.run("train_npu.sh")
    assert (ran.code, ran.asked) == (2, [])
    assert ran.said.startswith("train_npu.sh: there is an NPU but no CANN") and ran.said.count("\n") == 1


def test_an_npu_that_does_not_answer_is_none(checkout: Checkout) -> None:
    checkout.program("npu-smi", "#!/bin/sh\necho 'DrvMngGetConsoleLogLevel failed'\nexit 1\n")
    assert checkout.run("train_npu.sh").said.startswith("train_npu.sh: no Ascend NPU found")


def test_on_a_host_cann_is_sourced_and_every_device_gets_a_process(host: Checkout) -> None:
    ran = host.run("train_npu.sh", "--run-dir", "x", "train.steps=1", DEVICES="4")
    assert ran.code == 7, ran.said
    assert ran.asked[:2] == [
        "-m venv --clear .venv-npu",
        "-m pip install -qq --disable-pip-version-check -r requirements-npu.txt",
    ]
    assert [line.split()[-1] for line in ran.asked[3:5]] == ["vllm==0.23.0", "vllm-ascend==0.23.0"]
    words = "--config configs/photo_tiny.yaml --run-dir x train.steps=1"
    assert ran.asked[-3:] == [
        f"-m npu_vlrl config {words}",
        "-m npu_vlrl data geo3k --out runs/data/geo3k",
        f"{TORCHRUN} --standalone --nproc-per-node 4 -m npu_vlrl train {words}",
    ]
    got = host.environment()
    assert (got["CANN_WAS"], got["ATB_WAS"]) == ("here", "after-here")
    assert (got["NPU_VLRL_PLATFORM"], got["A_SETTING"], got["OMP_NUM_THREADS"]) == ("npu", "recommended", "1")


@pytest.mark.parametrize("inside", ["set_env.sh", "../set_env.sh"])
def test_a_named_cann_comes_first(host: Checkout, tmp_path: Path, inside: str) -> None:
    latest = tmp_path / "opt" / "latest"
    latest.mkdir(parents=True)
    (latest / inside).write_text("export CANN_WAS=named\n")
    host.run("train_npu.sh", ASCEND_HOME_PATH=str(latest), DEVICES="1")
    assert host.environment()["CANN_WAS"] == "named"


def test_what_is_set_already_stays(host: Checkout) -> None:
    host.run("train_npu.sh", A_SETTING="mine", OMP_NUM_THREADS="9")
    got = host.environment()
    assert (got["A_SETTING"], got["OMP_NUM_THREADS"]) == ("mine", "9")


def test_one_device_needs_no_torchrun(host: Checkout) -> None:
    ran = host.run("train_npu.sh", "--run-dir", "x", DEVICES="1")
    assert ran.asked[-1] == "-m npu_vlrl train --config configs/photo_tiny.yaml --run-dir x"


def test_an_interpreter_of_ones_own_is_left_as_it_is(host: Checkout) -> None:
    ran = host.run("train_npu.sh", "--run-dir", "x", NPU_VLRL_PYTHON=str(host.python))
    assert not any("venv" in line or "pip" in line for line in ran.asked)
    assert ran.asked[-1].startswith(f"{TORCHRUN} --standalone --nproc-per-node 2")
    ran = host.run("train_npu.sh", NPU_VLRL_PYTHON="/nowhere/python")
    assert (ran.code, ran.asked) == (2, [])
    assert "NPU_VLRL_PYTHON=/nowhere/python is not a Python" in ran.said


def test_the_platform_has_the_last_word(host: Checkout) -> None:
    ran = host.run("train_npu.sh", HARDWARE="")
    assert ran.code == 2 and ran.said.endswith("npu-vlrl: no such hardware\n")
    assert ran.asked[-1] == "-m npu_vlrl.hardware environment"


def test_the_stand_in_needs_no_npu(checkout: Checkout) -> None:
    ran = checkout.run("train_npu.sh", "--run-dir", "x", NPU_VLRL_HOST_CANN="1")
    assert ran.asked[-1].startswith(f"{TORCHRUN} --standalone --nproc-per-node 2 -m npu_vlrl train"), ran.said
    got = checkout.environment()
    assert (got["HOST_CANN_DEVICES"], got["NPU_VLRL_PLATFORM"], got["A_SETTING"]) == ("2", "npu", "recommended")


def test_several_machines_meet_at_the_first(host: Checkout) -> None:
    machines = {"NNODES": "2", "MASTER_ADDR": "10.0.0.1"}
    ran = host.run("train_npu.sh", "--run-dir", "x", NODE_RANK="1", **machines)
    assert ran.asked[-1].startswith(
        f"{TORCHRUN} --nnodes 2 --node-rank 1 --master-addr 10.0.0.1 --master-port 29500 --nproc-per-node 2 -m npu_vlrl"
    )
    ran = host.run("train_npu.sh", "--run-dir", "x", NODE_RANK="0", MASTER_PORT="1234", DEVICES="1", **machines)
    assert "--master-port 1234 --nproc-per-node 1" in ran.asked[-1]


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"NNODES": "2"}, "NNODES=2 also needs MASTER_ADDR, the first machine's address, and NODE_RANK"),
        ({"NNODES": "2", "MASTER_ADDR": "a"}, "this machine's number from 0 to 1"),
        ({"NNODES": "2", "MASTER_ADDR": "a", "NODE_RANK": "x"}, "NODE_RANK=x is not a whole number"),
        (
            {"NNODES": "2", "MASTER_ADDR": "a", "NODE_RANK": "2"},
            "NODE_RANK=2 is not below NNODES=2: the machines are numbered from 0 to 1; correct one of the two",
        ),
        ({"NNODES": "08", "MASTER_ADDR": "a", "NODE_RANK": "09"}, "NODE_RANK=09 is not below NNODES=8: "),
        (
            {"NNODES": "2", "MASTER_ADDR": "node.invalid", "NODE_RANK": "1"},
            "MASTER_ADDR=node.invalid is no address that this machine can resolve; set it to the first machine's",
        ),
        ({"NNODES": "0"}, "NNODES=0 is not a whole number of at least 1"),
        ({"NPU_VLRL_PROCESSES": "two"}, "NPU_VLRL_PROCESSES=two is not a whole number of at least 1"),
        ({"NPU_VLRL_PROCESSES": "0"}, "NPU_VLRL_PROCESSES=0 is not a whole number of at least 1"),
    ],
)
def test_bad_numbers_are_named(host: Checkout, variables: dict[str, str], message: str) -> None:
    ran = host.run("train_npu.sh", **variables)
    assert ran.code == 2 and message in ran.said.splitlines()[-1]
    assert not any("train" in line for line in ran.asked) and "goes on with" not in ran.said


@pytest.mark.parametrize("devices", ["1", "2"])
def test_bad_input_keeps_its_exit_code_and_is_not_told_how_to_go_on(host: Checkout, devices: str) -> None:
    ran = host.run("train_npu.sh", "train.stepz=1", CONFIG_CODE="2", DEVICES=devices)
    assert ran.code == 2 and ran.asked[-1].startswith("-m npu_vlrl config")
    assert "goes on with" not in ran.said
    assert "goes on with" in host.run("train_npu.sh", DEVICES=devices).said


def test_ray_starts_the_processes_from_one(host: Checkout) -> None:
    """However many devices there are; the configuration says so, in its file or on the command line."""
    resolved = "sync:\n  timeout_s: 1\nray:\n  processes: %s\n  address: local\n"
    words = "--config configs/photo_tiny.yaml --run-dir x"
    data = "-m npu_vlrl data geo3k --out runs/data/geo3k"
    ran = host.run("train_npu.sh", "--run-dir", "x", RESOLVED=resolved.replace("%s", "4"))
    assert (ran.code, ran.asked[-3:]) == (7, [f"-m npu_vlrl config {words}", data, f"-m npu_vlrl train {words}"])
    assert host.run("train_npu.sh", RESOLVED=resolved.replace("%s", "0")).asked[-1].startswith(TORCHRUN)
    machines = {"NNODES": "2", "MASTER_ADDR": "a", "NODE_RANK": "0"}
    ran = host.run("train_npu.sh", RESOLVED=resolved.replace("%s", "4"), **machines)
    assert ran.code == 2 and "NNODES=2 and ray.processes exclude each other" in ran.said


@pytest.mark.parametrize(("script", "platform"), [("train_cpu.sh", "cpu"), ("train_gpu.sh", "cuda")])
def test_processes_are_asked_for_elsewhere(checkout: Checkout, script: str, platform: str) -> None:
    checkout.program("nvidia-smi", "#!/bin/sh\necho 'GPU 0: one of them'\n")
    ran = checkout.run(script, "--run-dir", "x")
    assert ran.asked[-1].startswith("-m npu_vlrl train")
    assert checkout.environment()["NPU_VLRL_PLATFORM"] == platform
    ran = checkout.run(script, "--run-dir", "x", NPU_VLRL_PROCESSES="3")
    assert ran.asked[-1].startswith(f"{TORCHRUN} --standalone --nproc-per-node 3 -m npu_vlrl train")


def test_only_the_first_machine_tells_how_to_go_on(host: Checkout) -> None:
    said = [host.run("train_npu.sh", NNODES="2", MASTER_ADDR="a", NODE_RANK=rank).said for rank in "01"]
    assert ["run.if_exists=resume" in words for words in said] == [True, False]
