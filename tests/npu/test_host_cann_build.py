"""How the stand-in is built, started, and handed to child processes."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

from tests import host_cann
from tests.host_cann import build, operators
from tests.host_cann.children import run
from tests.host_cann.table import TABLE, c_functions


def test_the_table_is_what_the_library_has():
    library = operators_library()
    for name in TABLE:
        assert getattr(library, name), name
        assert getattr(library, f"{name}GetWorkspaceSize"), name
    with pytest.raises(AttributeError, match="aclnnMatmul"):
        library.aclnnMatmul  # noqa: B018


def operators_library():
    return ctypes.CDLL(str(build.build() / "libopapi.so"))


def test_a_kernel_with_other_arguments_than_the_table_is_refused():
    kernels = {name: kernel for name, kernel, _ in operators._kernels}
    with pytest.raises(AssertionError, match="aclnnSwiGlu"):
        operators.install(operators_library(), kernels | {"aclnnSwiGlu": lambda x, y: None})
    del kernels["aclnnRmsNorm"]
    with pytest.raises(AssertionError, match="aclnnRmsNorm"):
        operators.install(operators_library(), kernels)


def test_the_cache_is_used_again_and_named_after_its_contents(monkeypatch, tmp_path):
    first = build.build()
    assert build.build() == first
    monkeypatch.setenv("HOST_CANN_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "c_functions", lambda: c_functions() + "\n/* another table */\n")
    other = build.build()
    assert other.parent == tmp_path
    assert other.name != first.name
    assert {path.name for path in other.glob("*.so")} == set(build.SOURCES)
    assert list(tmp_path.iterdir()) == [other]


def test_a_missing_compiler_is_said(monkeypatch, tmp_path):
    monkeypatch.setenv("HOST_CANN_CACHE", str(tmp_path))
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(RuntimeError, match="install gcc"):
        build.build()
    assert not list(tmp_path.iterdir())


def test_a_source_that_does_not_compile_is_shown(monkeypatch, tmp_path):
    monkeypatch.setenv("HOST_CANN_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "c_functions", lambda: "int broken(")
    with pytest.raises(RuntimeError, match=r"libopapi.so does not compile[\s\S]*opapi.c:"):
        build.build()
    assert not list(tmp_path.iterdir())


def test_processes_that_build_at_once_do_not_disturb_each_other(tmp_path):
    code = "from tests.host_cann import build; print(build.build())"
    environment = {**os.environ, **host_cann.environment(), "HOST_CANN_CACHE": str(tmp_path)}
    children = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    folders = {child.communicate()[0].strip() for child in children}
    assert all(child.returncode == 0 for child in children)
    assert len(folders) == 1
    assert len(list(tmp_path.iterdir())) == 1


def test_starting_twice_is_the_same_and_starting_too_late_is_refused():
    host_cann.start()
    late = "import sys; sys.modules['torch_npu'] = sys\nfrom tests import host_cann\nhost_cann.start()"
    (child,) = run(late, NPU_VLRL_HOST_CANN="0")
    assert "torch_npu was imported before the stand-in" in child.output


def test_the_environment_can_be_used_for_a_child_of_a_child():
    paths = host_cann.environment()["PYTHONPATH"].split(os.pathsep)
    assert len(paths) == len(set(paths))
