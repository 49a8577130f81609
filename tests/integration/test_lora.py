"""Adapters: only they learn, the engine samples with them, and the export is a plain model that has them merged."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from npu_vlrl.cli import main
from npu_vlrl.config import dump_config
from npu_vlrl.train_loop import train
from tests.support.learning import (
    SMALL_LORA,
    Probe,
    distance,
    load,
    make_learner,
    plain_model,
    samples_of,
    tiny_folder,
)
from tests.support.runs import exported_weights, lines, small_config

torch.set_num_threads(1)


def test_a_fresh_adapter_changes_nothing_and_its_gradient_is_the_chain_rule() -> None:
    """With W' = W + s B A and B = 0: dL/dB = s (dL/dW) Aᵀ and dL/dA = 0."""
    samples = samples_of(load())
    adapter, whole = make_learner(load(lora=SMALL_LORA), kind=Probe), make_learner(load(), kind=Probe)
    found, full = adapter.measure(samples), whole.measure(samples)
    assert adapter.loss == pytest.approx(whole.loss, rel=1e-5)
    scale = SMALL_LORA.alpha / SMALL_LORA.rank
    expected = {}
    for name, parameter in adapter.parameters.items():
        if ".lora_A." in name:
            target = name.removeprefix("base_model.model.").replace(".lora_A.default", "")
            expected[name.replace("lora_A", "lora_B")] = scale * full[target] @ parameter.detach().T
            assert not found[name].any()
    assert len(expected) == 14
    assert distance({name: found[name] for name in expected}, expected) < 1e-5


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora") / "run"
    settings = {"model__lora": {"rank": 2, "alpha": 4}, "warm_start__steps": 0, "optim__lr": 5e-2, "run__dir": folder}
    train(small_config(folder, **settings))
    return folder


def test_the_engine_samples_with_the_adapter(finished: Path) -> None:
    trained = [line for line in lines(finished, "metrics.jsonl") if "grad_norm" in line]
    assert max(line["logprob_gap"] for line in trained) < 1e-5
    assert trained[0]["kl"] < 1e-10 and trained[-1]["kl"] > 1e-3  # the adapter is not what it was at the start
    start, end = plain_model(tiny_folder()), plain_model(finished / "export")
    changed = {n for (n, a), b in zip(start.named_parameters(), end.parameters(), strict=True) if not torch.equal(a, b)}
    assert len(changed) == 14 and all(name.split(".")[-2].endswith("_proj") for name in changed)


def test_checkpoint_and_export(finished: Path) -> None:
    saved = load_file(finished / "checkpoints" / "step-00000004" / "weights.safetensors")
    assert len(saved) == 28 and all("lora_" in name for name in saved)
    assert not any("lora" in name for name in exported_weights(finished))
    assert not list((finished / "export").glob("adapter*"))


@pytest.mark.parametrize("source", ["lora", "whole"])
def test_an_export_plays_as_the_run_did_at_its_end(
    finished: Path, tmp_path: Path, source: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`npu-vlrl eval --config … model.path=<export>`, token for token."""
    run = finished
    if source == "whole":
        run = tmp_path / "whole"
        train(small_config(run, train__steps=2))
    config = tmp_path / "eval.yaml"
    config.write_text(dump_config(small_config(tmp_path / "eval", warm_start__steps=0)))
    assert main(["eval", "--config", str(config), f"model.path={run / 'export'}"]) == 0
    assert "run folder" in capsys.readouterr().out
    played = json.loads((tmp_path / "eval" / "summary.json").read_text())["evaluation"]
    assert played == json.loads((run / "summary.json").read_text())["final"]
    final = [line for line in lines(run, "trajectories.jsonl") if line["id"].startswith("final")]
    again = lines(tmp_path / "eval", "trajectories.jsonl")
    texts = [[[turn["action"]["token_ids"] for turn in line["turns"]] for line in side] for side in (final, again)]
    assert texts[0] == texts[1] and len(texts[0]) == 2
    start = [line for line in lines(run, "trajectories.jsonl") if line["id"].startswith("baseline")]
    assert [[turn["action"]["token_ids"] for turn in line["turns"]] for line in start] != texts[1]
