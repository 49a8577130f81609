"""Why an NPU cannot be used, told without one: packages, libraries and device files that are there or not."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from npu_vlrl.hardware import HardwareError, npu
from npu_vlrl.hardware.npu import NpuPlatform


class Machine:
    """A machine on which all of it works, as far as that can be shown without the real torch_npu."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.patch = root, monkeypatch
        monkeypatch.syspath_prepend(root)
        (root / "torch_npu.py").write_text("")
        monkeypatch.setattr(npu, "LIBRARIES", ("libc.so.6",))
        monkeypatch.setattr(npu, "DEVICE_FILES", str(root / "davinci[0-9]*"))
        self.finds(lambda: 4)
        monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES", raising=False)
        (root / "davinci0").touch()
        self.install("torch", "2.10.0+cpu")
        self.install("torch_npu", "2.10.0.post4")

    def breaks(self, library: str) -> None:
        """torch_npu does not load, since a library is not there."""
        self.patch.setattr(npu, "LIBRARIES", ("libc.so.6", library))
        (self.root / "torch_npu.py").write_text("raise ImportError('cannot open shared object file')")

    def finds(self, device_count: Callable[[], int]) -> None:
        self.patch.setattr(NpuPlatform, "api", lambda platform: SimpleNamespace(device_count=device_count))

    def install(self, package: str, version: str) -> None:
        for old in self.root.glob(f"{package}-*"):
            (old / "METADATA").unlink()
            old.rmdir()
        folder = self.root / f"{package}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")

    def missing(self) -> str:
        npu.load_torch_npu.cache_clear()
        sys.modules.pop("torch_npu", None)
        return str(NpuPlatform().missing())


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    yield Machine(tmp_path, monkeypatch)
    npu.load_torch_npu.cache_clear()
    sys.modules.pop("torch_npu", None)


def test_nothing_is_missing(machine: Machine) -> None:
    assert machine.missing() == "None"
    machine.patch.setenv("ASCEND_RT_VISIBLE_DEVICES", "0,1,2,3")
    assert machine.missing() == "None" and sys.modules["torch_npu"] is not None


def test_no_driver(machine: Machine) -> None:
    machine.breaks("libnothing_of_cann.so")
    (machine.root / "davinci0").unlink()
    assert machine.missing().startswith("there is no Ascend driver or device (no ")
    assert "install the driver and firmware, or hand the devices to the container" in machine.missing()


def test_no_libraries_of_the_driver(machine: Machine) -> None:
    machine.breaks("libascend_hal.so")
    assert machine.missing().startswith("the Ascend driver's libraries do not load (libascend_hal.so: cannot open")


def test_no_cann(machine: Machine) -> None:
    machine.breaks("libnothing_of_cann.so")
    assert machine.missing().startswith("CANN does not load (libnothing_of_cann.so: cannot open shared object file")
    assert "source its set_env.sh in this shell" in machine.missing()
    assert sys.modules["torch_npu"] is None and importlib.util.find_spec("torch_npu") is None


def test_versions_that_do_not_fit(machine: Machine) -> None:
    machine.install("torch", "2.13.0")
    wrong = (
        "torch_npu 2.10.0.post4 needs torch 2.10.0, and torch 2.13.0 is installed; install a pair of one version: "
        "pip install torch==2.10.0 torch_npu==2.10.0.post4"
    )
    (machine.root / "torch_npu.py").write_text("raise SystemExit('a crash')")
    assert machine.missing() == wrong and sys.modules["torch_npu"] is None
    assert wrong in NpuPlatform().warnings()


def test_versions_that_nobody_tried_are_a_warning(machine: Machine) -> None:
    assert NpuPlatform().warnings() == []
    machine.install("torch", "2.99.0")
    machine.install("torch_npu", "2.99.0rc1")
    assert machine.missing() == "None"
    (warning,) = NpuPlatform().warnings()
    assert warning == "torch_npu 2.99.0 was not tried with this project; 2.9.0, 2.10.0, 2.13.0 were"


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (
            "raise RuntimeError('Two accelerators cannot be used at the same time\\nand more')",
            "Two accelerators cannot",
        ),
        ("raise ImportError('undefined symbol: _ZN2at')", "undefined symbol: _ZN2at; its version must suit torch's"),
        ("raise AttributeError()", "AttributeError; its version"),
    ],
)
def test_an_import_that_fails(machine: Machine, capsys: pytest.CaptureFixture[str], code: str, reason: str) -> None:
    (machine.root / "torch_npu.py").write_text(f"print('chatter')\n{code}\n")
    said = machine.missing()
    assert said.startswith(f"torch_npu does not load: {reason}") and "more" not in said
    assert capsys.readouterr() == ("", "chatter\n")


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("", "ASCEND_RT_VISIBLE_DEVICES is empty, which hides every NPU; unset it, or name devices, e.g. "),
        ("x", "ASCEND_RT_VISIBLE_DEVICES=x is not a list of device numbers; write them with commas alone"),
        ("0-3", "ASCEND_RT_VISIBLE_DEVICES=0-3 is not a list"),
        ("0, 1", "ASCEND_RT_VISIBLE_DEVICES=0, 1 is not a list"),
        ("0,,1", "ASCEND_RT_VISIBLE_DEVICES=0,,1 is not a list"),
        ("5,2", "ASCEND_RT_VISIBLE_DEVICES=5,2 does not ascend, as CANN needs it; write ASCEND_RT_VISIBLE_DEVICES=2,5"),
        ("2,2", "ASCEND_RT_VISIBLE_DEVICES=2,2 does not ascend"),
        ("1,2,3,4,9", "ASCEND_RT_VISIBLE_DEVICES=1,2,3,4,9 names 5 NPUs, but only 4 of them can be found; name what "
         "`npu-smi info` shows"),
    ],
)  # fmt: skip
def test_visible_devices_that_are_not(machine: Machine, value: str, says: str) -> None:
    machine.patch.setenv("ASCEND_RT_VISIBLE_DEVICES", value)
    assert machine.missing().startswith(says)


def test_no_device_at_all(machine: Machine) -> None:
    machine.finds(lambda: 0)
    assert machine.missing().startswith("CANN finds no NPU although there are ")
    (machine.root / "davinci0").unlink()
    assert machine.missing().startswith("there is no Ascend driver or device")


def test_a_driver_that_does_not_answer(machine: Machine) -> None:
    def broken() -> int:
        raise RuntimeError("aclrtGetDeviceCount: error code is 507899\nand more")

    machine.finds(broken)
    assert machine.missing() == (
        "CANN cannot count the NPUs: aclrtGetDeviceCount: error code is 507899; look at `npu-smi info`"
    )
    (machine.root / "davinci0").unlink()
    assert machine.missing().startswith("there is no Ascend driver or device")


def test_physical_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES", raising=False)
    assert NpuPlatform().physical_id(3) == "3"
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "2,5")
    assert [NpuPlatform().physical_id(index) for index in (0, 1)] == ["2", "5"]
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "5,x")
    with pytest.raises(HardwareError, match="ASCEND_RT_VISIBLE_DEVICES=5,x is not a list"):
        NpuPlatform().physical_id(0)


def test_the_driver_says_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "version.info"
    monkeypatch.setattr(npu, "DRIVER_VERSION", str(file))
    assert npu._driver_version() == f"unknown (no {file})"
    file.write_text("package_version=25.0\nVersion=24.1.rc3\nascendhal_version=7.35\n")
    assert npu._driver_version() == "24.1.rc3"


def test_without_torch_npu_nothing_is_loaded_or_said(monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import ctypes, importlib.metadata as m, sys\n"
        "real = m.version\n"
        "def version(name):\n"
        "    if name == 'torch_npu': raise m.PackageNotFoundError(name)\n"
        "    return real(name)\n"
        "m.version = version; import torch; ctypes.CDLL = None\n"
        "from npu_vlrl.hardware import PLATFORMS\n"
        "print(PLATFORMS['npu']().missing()); assert 'torch_npu' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "" and done.stdout == (
        "torch_npu is not installed; run launch/install_npu.sh, or install requirements-npu.txt\n"
    )
