"""What users of comparable systems ran into: where each of it is tested, and the tests that fit nowhere else."""

from __future__ import annotations

import ast
import gc
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from safetensors.torch import load_file

from npu_vlrl.config import load_config
from npu_vlrl.model.tiny import write_tiny_model
from npu_vlrl.rollout.collect import Rollout
from npu_vlrl.train_loop import train
from npu_vlrl.training.run import Run
from npu_vlrl.types import Image, Verdict
from npu_vlrl.workflow.export import export
from tests.support.program import SMALL, config_file, parquet, program, records, row
from tests.support.scripted import Script, Verdicts, a_task, decode, play, workflow

TESTS = Path(__file__).parents[1]

HERE = "integration/test_hazards.py"
TURNS = "workflow/test_vision_multiturn.py"
TOOLS = "workflow/test_vision_multiturn_tools.py"
LIMITS = "workflow/test_vision_multiturn_limits.py"
ENGINE = "engines/test_engine_inprocess.py"
MODEL = "model/test_model_policy.py"
PACK = "learner/test_pack.py"
PERTURBED = "alignment/test_engine_perturbed.py"
UNTRUSTED = "alignment/test_render_untrusted.py"
APPEND = "alignment/test_render_append.py"
CASES = "alignment/test_render_cases.py"
IMAGES = "data/test_data_images.py"
RECORDS = "data/test_data_records.py"
POOL = "workflow/test_judge_pool.py"
REWARDS = "workflow/test_rewards.py"
BAD = "integration/test_bad_input.py"
CLI = "integration/test_cli.py"

COVERED = {
    # images and placeholders
    "a sampled placeholder id": [
        f"{ENGINE}::test_placeholders_and_padding_are_never_sampled",
        f"{TURNS}::test_an_engine_that_breaks_its_word_fails_the_sample_and_is_never_padded",
        "test_types.py::test_actions_that_cannot_be",
    ],
    "a prompt over the limit, image last": [
        f"{LIMITS}::test_a_prompt_that_cannot_fit_fails_with_its_name_and_the_remedy",
        f"{BAD}::test_prompts_that_do_not_fit_cost_their_group_only",
    ],
    "a tool's image that does not fit": [
        f"{LIMITS}::test_an_image_enters_with_all_its_tokens_or_not_at_all",
        f"{LIMITS}::test_every_limit",
    ],
    "a tool result with several images": [f"{TOOLS}::test_one_placeholder_run_for_each_image_of_a_result"],
    "tags that do not match the images": [
        f"{RECORDS}::test_bad_rows_name_row_field_and_remedy",
        f"{BAD}::test_rows_that_cannot_be_used_are_told_with_row_field_and_remedy",
    ],
    "literal <image> in a text": [
        f"{TURNS}::test_a_literal_image_tag_stays_text",
        f"{RECORDS}::test_literal_tags_stay_text_in_parts_and_answers",
        f"{UNTRUSTED}::test_placeholders_in_text_beside_a_real_image",
    ],
    "an un-templated image": [f"{CASES}::test_a_vision_model_with_a_text_template"],
    "the first image in a later turn": [f"{PERTURBED}::test_one_block_of_any_image_matters_to_later_actions_only"],
    "one decision about expansion": [
        f"{CASES}::test_ids_and_grids_equal_the_real_processor",
        "data/test_data_processor.py::test_patches_of_another_models_description_are_refused",
    ],
    "1, 3 and 0 images in a shuffled batch": [
        f"{PACK}::test_each_occurrence_keeps_its_own_image_in_any_order",
        f"{PACK}::test_a_shuffled_batch_scores_every_sample_as_if_it_were_alone",
    ],
    "odd shapes": [
        "data/test_data_processor.py::test_shapes_over_200_are_padded_with_white",
        f"{HERE}::test_a_run_on_images_of_every_kind",
    ],
    "EXIF orientation": [f"{IMAGES}::test_exif_orientations_come_out_upright"],
    "modes, animations and damaged files": [
        f"{IMAGES}::test_transparency_lies_on_white",
        f"{IMAGES}::test_sixteen_bits_are_scaled_not_clipped",
        f"{IMAGES}::test_decompression_bombs_are_refused_before_decoding",
        f"{HERE}::test_a_run_on_images_of_every_kind",
    ],
    # tokens and masks
    "ids that would be encoded otherwise": [f"{APPEND}::test_sampled_ids_are_kept_whatever_they_are"],
    "missing, NaN or None logprobs": [
        f"{TURNS}::test_an_engine_that_breaks_its_word_fails_the_sample_and_is_never_padded"
    ],
    "a template that strips thoughts": [
        f"{CASES}::test_a_vision_template_that_rewrites_keeps_all_images_in_order",
        "alignment/test_render_thinking.py::test_when_qwen3_vl_thinking_rewrites",
        f"{LIMITS}::test_rewriting_templates_keep_the_images_of_the_history",
        "workflow/test_export.py::test_concat_refuses_a_template_that_rewrote_history_and_names_the_turn",
    ],
    "a turn that is only a tool call": [
        "alignment/test_engine_match.py::test_every_action_token",
        f"{TOOLS}::test_a_tools_image_enters_as_a_new_image_with_its_placeholders",
    ],
    "mask 1 exactly on sampled ids": [
        f"{HERE}::test_three_turns_are_trained_and_nothing_else",
        f"{APPEND}::test_masks_by_hand",
        f"{PERTURBED}::test_a_mask_that_is_off_by_one",
    ],
    "three assistant turns": [f"{HERE}::test_three_turns_are_trained_and_nothing_else"],
    "system prompts": [f"{TURNS}::test_system_prompts", f"{APPEND}::test_no_second_system_prompt"],
    "a model that never stops": [f"{LIMITS}::test_a_model_that_never_stops_leaves_room_for_the_other_turns"],
    "broken tool calls": [
        f"{TOOLS}::test_what_a_model_calls_wrongly_is_told_to_it_and_costs_what_is_configured",
        "workflow/test_tools_hermes.py::test_no_truncation_yields_a_call",
    ],
    # positions, padding, packing
    "packed, padded, alone": ["alignment/test_engine_match.py::test_packed_padded_and_one_by_one"],
    "cached decoding against a full forward": [f"{MODEL}::test_continued_in_pieces_of_unequal_length"],
    "placeholders without their pixels": [f"{PACK}::test_placeholders_without_images_are_refused"],
    # rewards
    "hostile answers": [
        f"{POOL}::test_a_hostile_answer_costs_the_deadline_and_the_next_is_judged_right",
        f"{POOL}::test_huge_and_odd_texts",
        f"{REWARDS}::test_math_verify_rejects",
        f"{REWARDS}::test_last_box",
    ],
    "damaged golds": [f"{REWARDS}::test_bad_golds_are_data_errors_and_never_a_reward"],
    "a user's reward that raises, hangs or is no number": [
        f"{POOL}::test_a_users_function_that_fails",
        f"{TURNS}::test_a_judge_that_fails_costs_one_answer",
        f"{BAD}::test_a_reward_that_raises_or_hangs_for_some_answers",
    ],
    # advantages and losses
    "equal rewards with KL": ["learner/test_trainer_reference.py::test_equal_rewards_leave_the_gradient_of_the_kl"],
    "a group that lost members": [
        "rollout/test_rollout_collect.py::test_a_group_with_a_failed_member_is_left_out_whole",
        "learner/test_trainer.py::test_a_group_that_lost_a_member",
    ],
    "a group of one": [
        "test_config.py::test_combinations_that_mean_nothing",
        "learner/test_trainer.py::test_a_group_of_one_and_equal_rewards_teach_nothing",
    ],
    "rows shuffled between groups": ["learner/test_advantage.py::test_the_order_of_rows_does_not_matter"],
    "a reward in every step": ["workflow/test_export.py::test_rewards_are_their_definitions"],
    "every completion cut": ["learner/test_trainer.py::test_every_completion_cut_off"],
    "one NaN": ["learner/test_trainer.py::test_a_bad_number_skips_the_update_and_names_the_sample"],
    # engines and weights
    "an image before and after the tower changes": [
        f"{PERTURBED}::test_the_same_image_before_and_after_the_tower_changed"
    ],
    "the ratio right after a sync": [
        "learner/test_trainer.py::test_one_token_that_differs_stops_the_run_before_the_step",
        "integration/test_geo3k.py::test_geo3k_from_conversion_to_resume",
    ],
    "top-p or top-k": [
        "test_config.py::test_combinations_that_mean_nothing",
        "engines/test_engine_sampling.py::test_filters_equal_those_of_transformers",
    ],
    "adapters on language layers only": [
        "model/test_model_load.py::test_adapters_are_on_every_named_layer_of_the_language_model_only",
        "model/test_model_load.py::test_adapter_targets_that_match_nothing",
    ],
    "older key names": ["model/test_model_load.py::test_checkpoints_under_older_and_newer_key_names"],
    # checkpoint, resume, memory
    "resume equals an unbroken run": ["integration/test_resume.py", "learner/test_state.py"],
    "killed while writing a checkpoint": [
        "learner/test_checkpoint.py::test_the_previous_one_survives_a_kill_at_any_point"
    ],
    "killed while writing a record": ["report/test_run_folder.py::test_rewind_drops_a_line_that_a_crash_cut_off"],
    "memory stays flat over steps": [
        f"{HERE}::test_live_images_stay_flat_over_steps",
        "data/test_data_processor.py::test_memory_stays_flat_over_many_large_images",
    ],
    "a frozen tower": [
        "model/test_model_load.py::test_a_frozen_tower",
        "model/test_model_vision.py::test_a_frozen_tower_keeps_features_across_steps",
        f"{HERE}::test_a_frozen_tower_is_bit_identical_after_training",
    ],
    "an exported model in plain transformers": [
        "learner/test_state.py::test_plain_transformers_computes_what_the_live_policy_does"
    ],
    "import without the vendor's packages": ["architecture/test_source_rules.py"],
    # trust
    "a path that leaves its root": [
        f"{IMAGES}::test_paths_may_not_leave_their_root",
        f"{BAD}::test_rows_that_cannot_be_used_are_told_with_row_field_and_remedy",
    ],
    "YAML with Python tags": ["test_config.py::test_python_tags_are_refused_and_never_run"],
    "weights with pickled code": [f"{HERE}::test_pickled_weights_are_refused_and_never_loaded"],
    "text that acts on the terminal": [
        f"{CLI}::test_control_characters_of_data_do_not_reach_the_terminal",
        "report/test_console.py::test_lines_are_plain",
    ],
    "control tokens in a text": [f"{UNTRUSTED}::test_control_tokens_in_content_stay_characters"],
    "a reward file that is not there": [f"{CLI}::test_mistakes_in_the_configuration"],
    "one bad sample": [f"{BAD}::test_rows_that_cannot_be_used_are_told_with_row_field_and_remedy"],
}
"""Hazard -> tests, as `file` or `file::function`, from the folder of the tests."""


def missing(references: Sequence[str]) -> list[str]:
    gone = []
    for reference in references:
        file, _, name = reference.partition("::")
        path = TESTS / file
        functions = (
            {n.name for n in ast.parse(path.read_text()).body if isinstance(n, ast.FunctionDef)}
            if (path.is_file())
            else set()
        )
        if not functions or (name and name not in functions):
            gone.append(reference)
    return gone


def test_every_hazard_has_a_test_that_exists() -> None:
    assert {hazard: gone for hazard, named in COVERED.items() if (gone := missing(named))} == {}
    assert all(COVERED.values())
    absent = ["no/such.py::test", f"{HERE}::test_no_such_thing", "no/such.py"]
    assert missing([*absent, f"{HERE}::test_every_hazard_has_a_test_that_exists"]) == absent


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_VLRL_PLATFORM", "cpu")


def test_three_turns_are_trained_and_nothing_else() -> None:
    judge = Verdicts([Verdict(0.0, False), Verdict(0.0, False), Verdict(1.0, True)])
    script = Script(["left", "right", "up"])
    done = play(workflow(judge), script, a_task("Which way?"))
    (sample,) = export([done], "concat", "sum", 1.0, "tiny")
    pieces: list[tuple[bool, str]] = []
    for segment in sample.segments:
        pieces.append((segment.kind.value == "action", decode([segment])))
    assert [text for sampled, text in pieces if sampled] == [f"{word}<|im_end|>" for word in ("left", "right", "up")]
    ask = "\n<|im_start|>user\nNo. Try again.<|im_end|>\n<|im_start|>assistant\n"
    assert [text for sampled, text in pieces if not sampled][1:] == [ask, ask]
    flags = zip(pieces, sample.segments, strict=True)
    assert sample.loss_mask == [sampled for (sampled, _), segment in flags for _ in segment.token_ids]
    assert len(sample.trained) == 3


def saved(image: PIL.Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def noise(width: int, height: int) -> PIL.Image.Image:
    return PIL.Image.fromarray(np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8))


def test_a_run_on_images_of_every_kind(tmp_path: Path) -> None:
    """Every one that can be decoded is trained on; the others are refused by row; the run goes on."""
    photo = noise(40, 30)
    palette = photo.quantize(16)
    palette.info["transparency"] = 3
    deep = PIL.Image.fromarray(np.arange(1200, dtype=np.uint16).reshape(30, 40) * 50)
    frames = [noise(32, 32), noise(32, 33).resize((32, 32))]
    good = {
        **{f"{w}x{h}": saved(noise(w, h)) for w, h in ((1, 1), (1, 300), (2275, 10), (27, 257), (28, 28))},
        **{mode: saved(photo.convert(mode)) for mode in ("RGB", "RGBA", "LA", "L", "1")},
        "P": saved(palette),
        "16 bit": saved(deep),
        "CMYK": saved(photo.convert("CMYK"), "JPEG"),
        "animated": saved(frames[0], "GIF", save_all=True, append_images=frames[1:]),
        "turned": saved(photo, "JPEG", exif=_orientation(6)),
    }
    bad = {"truncated": saved(photo)[:-500], "zero bytes": b"", "text": b"not a picture"}
    rows = [
        row(0, extra_info={"id": name}, images=[{"bytes": data, "path": None}]) for name, data in (good | bad).items()
    ]
    file = parquet(tmp_path / "rows.parquet", rows)
    source = config_file(tmp_path, data={"train": {"path": str(file), "shuffle": False, "max_skip_share": 0.5}})
    sizes = [f"rollout.groups={len(rows)}", "evaluation.tasks=1"]
    done = program("train", "--config", source, *SMALL, *sizes, "--run-dir", tmp_path / "r")
    assert (done.code, done.err) == (0, "")
    for number in range(len(good), len(rows)):
        assert f"skipped rows.parquet row {number}, images[0]: " in done.out
    assert done.out.count("skipped") == len(bad)
    played = [r for r in records(tmp_path / "r", "trajectories.jsonl") if r["group"].startswith("step")]
    assert {record["task"] for record in played} == {f"rows/{name}" for name in good}
    (step,) = [m for m in records(tmp_path / "r", "metrics.jsonl") if "logprob_gap" in m]
    assert step["failed_groups"] == 0 and step["logprob_gap"] < 1e-4


def _orientation(value: int) -> PIL.Image.Exif:
    exif = PIL.Image.Exif()
    exif[0x0112] = value
    return exif


@pytest.mark.parametrize("leaky", [False, True])
def test_live_images_stay_flat_over_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leaky: bool) -> None:
    """Counted after each step of a real run; the count sees a rollout that somebody keeps."""
    counts: list[int] = []
    kept: list[Any] = []
    report = Run.report

    def counting(run: Run, step: int, rollout: Rollout, *rest: Any) -> None:
        report(run, step, rollout, *rest)
        if leaky:
            kept.append(rollout)
        gc.collect()
        counts.append(sum(type(thing) is Image for thing in gc.get_objects()))

    monkeypatch.setattr(Run, "report", counting)
    source = config_file(tmp_path, data={"train": {"generator": "arrow"}})
    overrides = [word for word in SMALL if "steps" not in word]
    train(load_config(source, [*overrides, "train.steps=5", f"run.dir={tmp_path / 'r'}", "run.show_every=0"]))
    growth = counts[-1] - counts[1]
    assert growth > 0 if leaky else growth <= 0


def test_a_frozen_tower_is_bit_identical_after_training(tmp_path: Path) -> None:
    source = config_file(tmp_path, data={"train": {"generator": "arrow"}}, optim={"lr": 0.01, "weight_decay": 0.1})
    reward = tmp_path / "mine.py"
    reward.write_text("def reward(task, text, history, images):\n    return len(text) % 3\n")
    words = [word for word in SMALL if not word.startswith("reward")]
    for frozen in (True, False):
        folder = tmp_path / f"r{frozen}"
        settings = [f"model.freeze_vision={frozen}".lower(), f"reward.rule={reward}:reward"]
        done = program("train", "--config", source, *words, *settings, "rollout.group_size=4", "--run-dir", folder)
        assert (done.code, done.err) == (0, "")
        before = load_file(folder / "model" / "qwen2_5_vl-seed0" / "model.safetensors")
        after = load_file(folder / "export" / "model.safetensors")
        assert before.keys() == after.keys()
        changed = {name for name in before if not torch.equal(before[name], after[name])}
        assert any("visual" in name for name in changed) != frozen
        assert any("visual" not in name for name in changed)


class Trap:
    """Runs code when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.target,)


def test_pickled_weights_are_refused_and_never_loaded(tmp_path: Path) -> None:
    folder, touched = tmp_path / "m", tmp_path / "touched"
    write_tiny_model("qwen3", folder, 0, hidden=32, layers=1)
    (folder / "model.safetensors").unlink()
    torch.save({"model.embed_tokens.weight": Trap(touched)}, folder / "pytorch_model.bin")
    source = config_file(tmp_path, data={"train": {"generator": "arrow"}}, model={"path": str(folder)})
    done = program("train", "--config", source, *SMALL, "--run-dir", tmp_path / "r")
    assert "model.safetensors" in done.refused() and not touched.exists()
    torch.load(folder / "pytorch_model.bin", weights_only=False)
    assert touched.exists()  # the trap works
