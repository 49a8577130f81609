"""vllm-ascend and the vLLM that it goes with, as published: what imports over the stand-in for CANN, and what the rest,
which needs CANN, says in its source of the calls that `rollout/vllm.py` makes."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from npu_vlrl.cli import main
from npu_vlrl.hardware import npu
from npu_vlrl.hardware.npu import NpuPlatform
from npu_vlrl.rollout.vllm_adapter import RANKS, AdapterFolder
from tests import host_cann
from tests.support.learning import SMALL_LORA
from tests.support.models import load, tiny_folder

ROOT = Path(__file__).parents[2]
SOURCES = Path(sys.prefix) / "vllm-ascend"
"""Where `bash launch/test.sh --npu` puts both, beside the packages of the environment: nothing finds them unasked."""

OURS = ast.parse((ROOT / "npu_vlrl" / "rollout" / "vllm.py").read_text())


def definition(path: str, name: str) -> ast.ClassDef:
    tree = ast.parse((SOURCES / path).read_text())
    (found,) = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name]
    return found


def fields(path: str, name: str) -> set[str]:
    body = definition(path, name).body
    return {item.target.id for item in body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)}


def methods(path: str, name: str) -> dict[str, list[str]]:
    """Names of arguments by name of the method."""
    return {
        item.name: [argument.arg for argument in (*item.args.args, *item.args.kwonlyargs)][1:]
        for item in definition(path, name).body
        if isinstance(item, ast.FunctionDef)
    }


def keywords_of_ours(function: str) -> set[str]:
    """Those that our code calls it with; where they come in dicts, the keys of these."""
    (method,) = [
        node
        for node in ast.walk(OURS)
        if isinstance(node, ast.FunctionDef)
        and any(isinstance(call, ast.Call) and ast.unparse(call.func) == function for call in ast.walk(node))
    ]
    (call,) = [n for n in ast.walk(method) if isinstance(n, ast.Call) and ast.unparse(n.func) == function]
    named = {keyword.arg for keyword in call.keywords if keyword.arg is not None}
    if len(named) < len(call.keywords):
        inner = {id(node) for keyword in call.keywords if keyword.arg for node in ast.walk(keyword.value)}
        dicts = [node for node in ast.walk(method) if isinstance(node, ast.Dict) and id(node) not in inner]
        named |= {key.value for node in dicts for key in node.keys if isinstance(key, ast.Constant)}
    return named


def test_an_engine_takes_the_arguments_that_we_pass() -> None:
    known = fields("vllm/engine/arg_utils.py", "EngineArgs")
    passed = keywords_of_ours("self._vllm.LLM")
    assert passed >= {"tensor_parallel_size", "worker_extension_cls", "enable_sleep_mode", "mm_processor_kwargs"}
    assert passed <= known, passed - known
    assert not {"tensor_parallel"} <= known  # the check can fail


def test_a_request_takes_the_arguments_that_we_pass() -> None:
    passed = keywords_of_ours("self._vllm.SamplingParams")
    assert passed >= {"output_kind", "logit_bias", "seed"}
    assert passed <= fields("vllm/sampling_params.py", "SamplingParams")


def test_the_calls_that_we_make() -> None:
    llm = methods("vllm/entrypoints/llm.py", "LLM")
    assert "level" in llm["sleep"] and "tags" in llm["wake_up"]
    assert {"method", "args"} <= set(llm["collective_rpc"])
    assert {"apply_model", "reset_prefix_cache", "_preprocess_cmpl"} <= llm.keys()
    engine = methods("vllm/v1/engine/llm_engine.py", "LLMEngine")
    assert engine["add_request"][:3] == ["request_id", "prompt", "params"]
    assert engine["abort_request"][0] == "request_ids"
    assert {"step", "has_unfinished_requests", "reset_encoder_cache"} <= engine.keys()


def test_an_adapter_is_taken_as_we_give_it() -> None:
    policy = load(tiny_folder("qwen3"), lora=SMALL_LORA).policy
    adapter = AdapterFolder(policy)
    assert adapter.options.keys() <= fields("vllm/engine/arg_utils.py", "EngineArgs")
    adapter.close()
    source = ast.parse((SOURCES / "vllm" / "config" / "lora.py").read_text())
    (ranks,) = [
        node.value
        for node in source.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "MaxLoRARanks"
    ]
    assert set(RANKS) <= set(ast.literal_eval(ast.unparse(ranks).removeprefix("Literal")))
    body = definition("vllm/lora/request.py", "LoRARequest").body
    names = [ast.unparse(item.target) for item in body if isinstance(item, ast.AnnAssign)]
    assert names[:3] == ["lora_name", "lora_int_id", "lora_path"]
    engine = methods("vllm/v1/engine/llm_engine.py", "LLMEngine")
    assert "lora_request" in engine["add_request"] and engine["add_lora"] == ["lora_request"]
    assert methods("vllm_ascend/worker/worker.py", "NPUWorker")["add_lora"] == ["lora_request"]


def test_a_worker_on_an_npu_takes_weights_sleeps_and_wakes() -> None:
    worker = methods("vllm_ascend/worker/worker.py", "NPUWorker")
    assert worker["sleep"] == ["level"] and worker["wake_up"] == ["tags"]
    assert {"get_model", "reset_encoder_cache"} <= worker.keys()
    # it has no interface for weights: `WeightTaker` is added to it, and may not hide what is there
    everything = worker | methods("vllm/v1/worker/worker_base.py", "WorkerBase")
    assert not {"update_weights", "start_weight_update", "take_weights", "set_logprobs_mode"} & everything.keys()
    assert "get_model" in methods("vllm/v1/worker/gpu_model_runner.py", "GPUModelRunner")
    bases = definition("vllm_ascend/worker/model_runner_v1.py", "NPUModelRunner").bases
    assert [ast.unparse(base) for base in bases] == ["GPUModelRunner"]


def test_its_sampler_does_as_it_is_told_afterwards() -> None:
    """It ignores the mode that the engine is given, so `WeightTaker.set_logprobs_mode` says it again. Nothing says it
    for each request, and the part that draws returns what the mode says."""
    runner = ast.unparse(definition("vllm_ascend/worker/model_runner_v1.py", "NPUModelRunner"))
    assert "self.sampler = AscendSampler()" in runner and "logprobs_mode" not in runner, "the step is not needed now"
    assert "self.sampler(logits=logits, sampling_metadata=sampling_metadata)" in runner
    sampler = definition("vllm_ascend/sample/sampler.py", "AscendSampler")
    assert "self.topk_topp_sampler = AscendTopKTopPSampler()" in ast.unparse(sampler)
    assert not {"forward", "sample", "gather_logprobs"} & methods("vllm_ascend/sample/sampler.py", sampler.name).keys()
    stock = ast.unparse(definition("vllm/v1/sample/sampler.py", "Sampler"))
    assert "logprobs_mode = logprobs_mode_override or self.logprobs_mode" in stock
    assert "if processed_logprobs is not None:\n            raw_logprobs = processed_logprobs" in stock
    draws = ast.unparse(definition("vllm_ascend/sample/sampler.py", "AscendTopKTopPSampler"))
    said = "elif self.logprobs_mode == 'processed_logprobs':\n            logits_to_return = logits.log_softmax("
    assert said in draws and draws.index("self.apply_top_k_top_p(logits, k, p)") < draws.index(said)
    assert draws.count(", logits_to_return)") == 2  # both ways of drawing
    worker = (SOURCES / "vllm_ascend" / "worker" / "worker.py").read_text()
    assert "self.model_runner = NPUModelRunner(" in worker


def test_an_npu_that_sleeps_has_no_segments_that_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its allocator asserts that, so the engine refuses it by name before models load."""
    allocator = ast.unparse(definition("vllm_ascend/device_allocator/camem.py", "CaMemAllocator"))
    name, settings = "PYTORCH_NPU_ALLOC_CONF", NpuPlatform.launch_environment["PYTORCH_NPU_ALLOC_CONF"].value
    assert f"conf = os.environ.get('{name}', '')" in allocator and f"assert '{settings}' not in conf" in allocator
    monkeypatch.setenv(name, settings)
    assert f"{name}={settings}" in str(NpuPlatform().against_sleep())


def test_an_npu_sizes_the_cache_by_a_share_of_its_memory() -> None:
    """So the engine passes one: vLLM elsewhere takes the number of bytes."""
    worker = (SOURCES / "vllm_ascend" / "worker" / "worker.py").read_text()
    assert "cache_config.gpu_memory_utilization" in worker and "cache_config.kv_cache_memory_bytes" not in worker
    assert {"gpu_memory_utilization", "kv_cache_memory_bytes"} <= keywords_of_ours("self._vllm.LLM")


def test_an_environment_that_cannot_sample_with_vllm_says_so_before_models_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NPU_VLRL_PLATFORM", "npu")
    there: dict[str, str] = {}
    really = npu.version
    monkeypatch.setattr(npu, "version", lambda package: there.get(package) or really(package))
    words = ["--config", str(ROOT / "configs" / "photo_tiny.yaml"), "--run-dir", str(tmp_path), "rollout.engine=vllm"]

    def refused() -> str:
        assert main(["train", *words]) == 2
        return capsys.readouterr().err.splitlines()[-1]

    assert refused() == (
        "npu-vlrl: rollout.engine=vllm needs vllm and vllm-ascend in this environment, and launch/install_npu.sh makes "
        "none with both the trainer and vLLM (docs/ascend.md says what is missing); set rollout.engine=inprocess"
    )
    there |= {"vllm": "0.18.0+empty", "vllm-ascend": "0.18.0"}
    assert refused().startswith("npu-vlrl: rollout.engine=vllm needs vLLM (")  # it is not there really


CHECK = """
from tests import host_cann
host_cann.start()
import sys
sys.path.append(sys.argv[1])
from vllm_ascend.distributed.device_communicators.pyhccl_wrapper import HCCLLibrary
from vllm_ascend.envs import env_variables
from vllm_ascend.platform import NPUPlatform
library = HCCLLibrary(sys.argv[2])
first, second = (bytes(library.hcclGetUniqueId().internal) for _ in range(2))
print(NPUPlatform.ray_device_key, NPUPlatform.device_control_env_var, NPUPlatform.device_name)
print(len(first), first != second, env_variables["VLLM_ASCEND_ENABLE_NZ"]())
"""


@pytest.mark.parametrize("nz", [None, NpuPlatform.launch_environment["VLLM_ASCEND_ENABLE_NZ"].value])
def test_what_imports_without_cann(nz: str | None) -> None:
    """The platform, and the library of collectives, which speaks to the stand-in's HCCL."""
    environment = {**os.environ, **host_cann.environment(), **({} if nz is None else {"VLLM_ASCEND_ENABLE_NZ": nz})}
    hccl = next(Path(host_cann.__file__).parent.rglob("libhccl.so"), "libhccl.so")
    done = subprocess.run(
        [sys.executable, "-c", CHECK, str(SOURCES), str(hccl)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    names, library = done.stdout.splitlines()[-2:]
    assert names == f"{NpuPlatform.ray_resource} {NpuPlatform.visible_devices_variable} npu"
    # weights in the format NZ cannot be woken; it is the default, and the launch scripts turn it off
    assert library == f"4108 True {1 if nz is None else 0}"
