"""The configuration: every kind of mistake is one message that says what to change."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from npu_vlrl.config import Config, ConfigError, dump_config, load_config, sections

BASE = "model:\n  path: tiny:qwen3\ndata:\n  train:\n    generator: arrow\n"


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "base.yaml"
    path.write_text(BASE)
    return path


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        load_config(path, overrides)
    return str(error.value)


def test_a_tilde_is_the_home_folder(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    given = ["run.dir=~/r", "model.path=~/m", "reward.rule=~/a.py:f", "workflow.tools=[~/b.py:g,look]"]
    given += ["data.train={path: ~/t, generator: null}", "data.eval.path=~/e"]
    config = load_config(base, given)
    assert (config.run.dir, config.model.path, config.reward.rule) == ("/home/me/r", "/home/me/m", "/home/me/a.py:f")
    assert config.workflow.tools == ("/home/me/b.py:g", "look")
    assert config.data.eval is not None
    assert (config.data.train.path, config.data.eval.path) == ("/home/me/t", "/home/me/e")
    game = load_config(base, ["environment.name=~/g.py:game", "data.train.generator=episodes"])
    assert game.environment.name == "/home/me/g.py:game"
    assert load_config(base, ["run.dir=a/~"]).run.dir == "a/~"


def test_a_minimal_file_and_overrides(base: Path) -> None:
    config = load_config(base)
    assert (config.model.path, config.data.train.generator, config.train.steps) == ("tiny:qwen3", "arrow", 100)
    changed = load_config(base, ["train.steps=7", "optim.betas=[0.5, 0.25]", "workflow.tools=[look]", "run.dir=a=b"])
    assert (changed.train.steps, changed.optim.betas) == (7, (0.5, 0.25))
    assert (changed.workflow.tools, changed.run.dir) == (("look",), "a=b")
    assert load_config(base, ["train.steps=1", "train.steps=2"]).train.steps == 2
    assert load_config(base, ["model.lora={}"]).model.lora is not None


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trian.steps=1", "trian: unknown key; did you mean train?"),
        ("train.stpes=1", "train.stpes: unknown key; did you mean train.steps?"),
        ("model.lora.rnk=2", "model.lora.rnk: unknown key; did you mean model.lora.rank?"),
        ("data.train.shufle=true", "data.train.shufle: unknown key; did you mean data.train.shuffle?"),
        ("qqqqqq=1", "qqqqqq: unknown key"),
        ("train.steps=x", "train.steps: Input should be a valid integer"),
        ("train.steps=1.5", "train.steps: Input should be a valid integer"),
        ("train.steps=", "train.steps: Input should be a valid integer (got None)"),
        ("train=5", "train: Input should be a valid dictionary"),
        ("run.dir=5", """got 5); quote it for YAML, and for the shell: 'run.dir="5"'"""),
        ("workflow.feedback=No: try again", """; quote it for YAML, and for the shell: 'workflow.feedback="…"'"""),
        ("workflow.tools=look", "valid tuple (got 'look'); write it as a list: workflow.tools=[look]"),
        ("model.lora=true", "(got True); it is a section, so set what is in it, e.g. model.lora.rank=16"),
        ("model=5", "it is a section, so set what is in it, e.g. model.path=…"),
        ("data.train.path=x", "of two that are given set one to null, as in data.train.path=null"),
        ("workflow.overlong_penalty=2", "overlong_penalty has no effect without workflow.overlong_tokens; set that"),
        ("run.if_exists=overwrite", "run.if_exists: Input should be 'raise' or 'resume' (got 'overwrite')"),
        ("train.seed=-1", "train.seed: Input should be greater than or equal to 0 (got -1)"),
        ("rollout.temperature=0", "rollout.temperature: Input should be greater than 0"),
        ("rollout.max_failed_share=1.5", "rollout.max_failed_share: Input should be less than or equal to 1"),
        ("workflow.turn_discount=0", "workflow.turn_discount: Input should be greater than 0"),
        ("optim.lr=nan", "optim.lr: Input should be a finite number"),
        ("optim.lr=.inf", "optim.lr: Input should be a finite number"),
        ("optim.betas=[0.9, 1.0]", "optim.betas.1: Input should be less than 1"),
        ("optim.betas=[0.9]", "optim.betas.1: required, but not given"),
        ("algorithm.dual_clip=1.0", "algorithm.dual_clip: Input should be greater than 1"),
        ("workflow.retry_when=never", "workflow.retry_when: String should match"),
        ("workflow.retry_when=reward_below", "workflow.retry_when: String should match"),
        ("workflow.retry_when=reward_below: 1.0", "workflow.retry_when: Input should be a valid string (got {'reward_"),
        ("model=null", "model: Input should be a valid dictionary"),
        ("train.steps=${train.nothing}", "Interpolation key 'train.nothing' not found"),
        ("train.steps", "override 'train.steps' is not of the form key=value, e.g. train.steps=10"),
        ("=5", "override '=5' is not of the form key=value"),
        ("train.steps=[1", "override 'train.steps=[1': while parsing a flow sequence"),
    ],
)
def test_mistakes_in_an_override(base: Path, override: str, message: str) -> None:
    assert message in refusal(base, override)


def test_all_mistakes_are_told_at_once(base: Path) -> None:
    lines = refusal(base, "train.stpes=1", "optim.lr=-1", "evaluation.tasks=x").splitlines()
    assert lines[0] == f"{base}:"
    assert [line.split(":")[0].strip() for line in lines[1:]] == ["train.stpes", "optim.lr", "evaluation.tasks"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "model: required, but not given"),
        ("5", "object type: int"),
        ("- a\n- b\n", "must hold a mapping of sections, got a list"),
        ("model: [1", "while parsing a flow sequence"),
        ("model: {path: a}\nmodel: {path: b}\n", "found duplicate key model"),
        (b"model: \xff\xfe", "codec can't decode"),
        (b"\x00\x01", "control characters are not allowed"),
        (BASE + "1: 2\n", "1: Keys should be strings"),
        (BASE + "run: &x {dir: *x}\n", "recursive"),
        (BASE + "train: {steps: '${oc.env:NO_SUCH_VARIABLE}'}\n", "'NO_SUCH_VARIABLE' not found"),
    ],
)
def test_files_that_are_no_configuration(tmp_path: Path, content: str | bytes, message: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    told = refusal(path)
    assert told.startswith(f"{path}:") and message in told


@pytest.mark.parametrize("tag", ["!!python/object/apply:os.mkdir", "!!python/object/new:os.mkdir", "!!python/name:os."])
def test_python_tags_are_refused_and_never_run(tmp_path: Path, base: Path, tag: str) -> None:
    target = tmp_path / "made"
    path = tmp_path / "evil.yaml"
    path.write_text(BASE + f"run:\n  dir: {tag} ['{target}']\n")
    assert "could not determine a constructor for the tag" in refusal(path)
    assert "could not determine a constructor" in refusal(base, f"run.dir={tag} ['{target}']")
    assert not target.exists()


def test_missing_files(tmp_path: Path) -> None:
    for path in (tmp_path / "none.yaml", tmp_path):
        assert refusal(path).startswith(f"{path}: no such configuration file; ")


def test_combinations_of_learners_that_mean_nothing(base: Path) -> None:
    assert "train.offload moves what train.shard divides" in refusal(base, "train.offload=true", "train.learners=2")
    assert "train.learners" in refusal(base, "train.learners=0") and "train.learners" in refusal(
        base, "train.learners=one"
    )
    assert load_config(base, ["train.learners=all", "train.shard=true", "train.offload=true"]).train.learners == "all"
    assert load_config(base, ["train.learners=3"]).train.learners == 3


@pytest.mark.parametrize(
    ("wrong", "right", "message"),
    [
        ("rollout.group_size=1", "train.steps=0", "rollout.group_size=1 gives every trajectory the advantage zero"),
        ("rollout.top_p=0.9", "train.steps=0", "rollout.top_p below 1 or rollout.top_k above 0"),
        ("rollout.top_k=5", "train.steps=0", "rollout.top_p below 1 or rollout.top_k above 0"),
        ("workflow.context_tokens=512", "workflow.turn_tokens=511", "workflow.turn_tokens must be smaller"),
        ("evaluation.tasks=0", "data.eval.path=x", "evaluation.tasks=0 means all of a file"),
        ("algorithm.updates=17", "rollout.groups=17", "algorithm.updates cannot exceed rollout.groups"),
        ("train.shard=true", "train.learners=2", "train.shard divides a learner over several processes"),
        (
            "data.train.generator=arow",
            "data.train.generator=photo",
            "there is no generator 'arow'; choose one of photo,",
        ),
        ("data.train.path=x", "data.train.generator=null", "data.train: give either `path` or `generator`"),
        ("data.train.generator=null", "data.train.path=x", "data.train: give either `path` or `generator`"),
        ("data.eval={}", "data.eval.generator=photo", "data.eval: give either `path` or `generator`"),
    ],
)
def test_combinations_that_mean_nothing(base: Path, wrong: str, right: str, message: str) -> None:
    assert message in refusal(base, wrong)
    load_config(base, [wrong, right])


def test_endless_evaluation_and_warm_start(base: Path) -> None:
    assert "a generator is endless" in refusal(base, "evaluation.tasks=0", "data.eval.generator=photo")
    file = ["data.train.generator=null", "data.train.path=x"]
    assert "warm_start needs data.train.generator" in refusal(base, "warm_start.steps=1", *file)
    assert "no adapter" in refusal(base, "warm_start.steps=1", "model.lora.rank=2")
    load_config(base, ["warm_start.steps=1"])
    load_config(base, file + ["evaluation.tasks=0"])


GAME = ["environment.name=sokoban", "data.train.generator=episodes"]


def test_a_game_is_configured_in_its_own_section(base: Path) -> None:
    config = load_config(base, [*GAME, "environment.options.size=5", "environment.format=no_think"])
    assert load_config(base).environment.is_judged and not config.environment.is_judged
    assert config.environment.options == {"size": 5}
    load_config(base, [*GAME, "data.eval.generator=episodes", "workflow.turn_discount=0.5", "warm_start.steps=1"])


@pytest.mark.parametrize(
    ("override", "idle"),
    [
        ("reward.rule=tagged", "reward.rule"),
        ("reward.failed_reward=1", "reward.failed_reward"),
        ("workflow.tools=[look]", "workflow.tools"),
        ("workflow.describe_tools=false", "workflow.describe_tools"),
        ("workflow.tool_call_reward=0.5", "workflow.tool_call_reward"),
        ("workflow.feedback=Try again.", "workflow.feedback"),
        ("workflow.retry_when='reward_below: 1.0'", "workflow.retry_when"),
    ],
)
def test_a_game_refuses_what_it_has_no_use_for(base: Path, override: str, idle: str) -> None:
    told = refusal(base, *GAME, override)
    assert f"environment.name=sokoban has no use for {idle}; leave that out" in told
    load_config(base, [override])


@pytest.mark.parametrize("override", ["format=no_think", "max_actions=2", "options.size=5", "explain=false"])
def test_visual_qa_refuses_what_is_for_games(base: Path, override: str) -> None:
    told = refusal(base, f"environment.{override}", "environment.end_token=x")
    assert "environment.name=visual_qa has no use for environment." in told and "environment.end_token" in told
    assert f"environment.{override.split('=')[0].split('.')[0]}" in told
    load_config(base, [*GAME, f"environment.{override}"])


def test_games_have_episodes_and_nothing_else_has(base: Path) -> None:
    assert "environment.name=visual_qa cannot use data.train.generator=episodes" in refusal(base, GAME[1])
    assert "environment.name=sokoban needs data.train.generator=episodes" in refusal(base, GAME[0])
    assert "needs data.eval.generator=episodes" in refusal(base, *GAME, "data.eval.generator=photo")
    assert "cannot use data.eval.generator=episodes" in refusal(base, "data.eval.generator=episodes")


@pytest.mark.parametrize("source", ["generator=arrow", "generator=episodes", "{path: x, generator: null}"])
def test_an_environment_of_ones_own_may_take_any_tasks(base: Path, source: str) -> None:
    """Only the file can tell whether it makes a game, which needs episodes; `build` says so then."""
    key = "data.train." if source.startswith("gen") else "data.train="
    config = load_config(base, ["environment.name=mine.py:make", key + source])
    assert config.environment.is_own
    assert "has no use for reward.rule" in refusal(base, "environment.name=mine.py:make", "reward.rule=tagged")


def test_retry_below(base: Path) -> None:
    assert load_config(base).workflow.retry_below is None
    for text, value in (("reward_below: 1.0", 1.0), ("reward_below:-2", -2.0), ("reward_below:  0.25", 0.25)):
        assert load_config(base, [f"workflow.retry_when='{text}'"]).workflow.retry_below == value


def test_interpolation_and_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_VLRL_TEST_DIR", "/somewhere")
    path = tmp_path / "c.yaml"
    path.write_text(BASE + "train: {seed: 7}\nrun: {dir: '${oc.env:NPU_VLRL_TEST_DIR}/${train.seed}'}\n")
    assert load_config(path).run.dir == "/somewhere/7"
    assert load_config(path, ["train.seed=8"]).run.dir == "/somewhere/8"


@pytest.mark.parametrize("path", sorted(Path(__file__).parents[1].glob("configs/*.yaml")), ids=lambda path: path.stem)
def test_the_projects_configurations_load_and_survive_a_dump(tmp_path: Path, path: Path) -> None:
    config = load_config(path)
    copy = tmp_path / "copy.yaml"
    copy.write_text(dump_config(config))
    assert load_config(copy) == config
    assert load_config(copy, ["train.seed=12345"]) != config


NASTY = ["1e3", "${x}", "\\${x}", "\\\\${x}", "${", "yes", "null", "012", "1_000", "\u2028", "\x85", "a: b", "'", ""]


@given(text=st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from(NASTY) | st.text("\\${}: ", max_size=6))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_survives_a_dump(tmp_path: Path, text: str) -> None:
    values: dict[str, Any] = {"model": {"path": "m"}, "data": {"train": {"generator": "arrow"}}}
    values |= {"workflow": {"feedback": text}, "reward": {"options": {"a": [text, {"b": text}]}}}
    config = Config.model_validate(values)
    path = tmp_path / "c.yaml"
    path.write_text(dump_config(config), encoding="utf-8")
    assert load_config(path) == config


def test_sections_name_every_key() -> None:
    keys = [key for key, _ in sections()]
    assert len(keys) == len(set(keys))
    assert {"model.path", "model.lora.rank", "data.eval.max_skip_share", "workflow.turn_discount"} <= set(keys)

    def leaves(value: Any, prefix: str) -> list[str]:
        if not isinstance(value, dict):
            return [prefix]
        return list(itertools.chain.from_iterable(leaves(v, f"{prefix}.{k}".lstrip(".")) for k, v in value.items()))

    source = {"path": "x", "columns": {}}
    full = {"model": {"path": "m", "lora": {}}, "data": {"train": source, "eval": source}}
    dumped = Config.model_validate(full).model_dump()
    for section in ("reward", "environment", "workflow"):
        dumped[section]["options"] = 0  # free-form
    assert sorted(keys) == sorted(leaves(dumped, ""))


def test_configurations_are_read_only(base: Path) -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_config(base).train.steps = 1


def test_of_several_files_a_later_one_wins_and_overrides_win_over_all(base: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text("train:\n  steps: 7\nmodel:\n  dtype: bfloat16\n")
    config = load_config([base, other], ["train.seed=3"])
    assert (config.train.steps, config.model.dtype, config.train.seed) == (7, "bfloat16", 3)
    assert config.model.path == load_config(base).model.path, "what it does not name is kept"
    assert load_config([base, other], ["train.steps=9"]).train.steps == 9
    other.write_text("train:\n  stepz: 7\n")
    with pytest.raises(
        ConfigError, match=rf"{base} \+ {other}:\n  train\.stepz: unknown key; did you mean train\.steps"
    ):
        load_config([base, other])
    other.write_text("- a list")
    with pytest.raises(ConfigError, match=f"{other}: the file must hold a mapping"):
        load_config([base, other])


GAME_FILE = """
environment:
  name: sokoban
  options: {size: 6, boxes: 1}
data:
  train:
    generator: episodes
"""
RULE_FILE = """
reward:
  rule: weighted
  options:
    terms:
      angle: {rule: rotation_strict, weight: 0.5, options: {distance: linear}}
      accuracy: {rule: tagged, weight: 0.5, options: {choices: [a, b]}}
    solved_by: angle
"""


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["environment.name=frozenlake"], {}),
        (["environment.name=frozenlake", "environment.options={slippery: true}"], {"slippery": True}),
        (["environment.options={slippery: true}", "environment.name=frozenlake"], {"slippery": True}),
        (["environment.options.size=4", "environment.name=frozenlake"], {"size": 4}),
        (["environment.name=frozenlake", "environment.name=sokoban"], {"size": 6, "boxes": 1}),
        (["environment.name=sokoban", "environment.options.size=5"], {"size": 5, "boxes": 1}),
        (["environment.options={size: 5, tile: 9}"], {"size": 5, "boxes": 1, "tile": 9}),
    ],
)
def test_options_are_of_the_game_that_they_stand_beside(
    base: Path, tmp_path: Path, overrides: list[str], expected: dict[str, Any]
) -> None:
    """Another game has none of the old one's; the same one keeps those that are not given again."""
    file = tmp_path / "game.yaml"
    file.write_text(GAME_FILE)
    assert load_config([base, file], overrides).environment.options == expected
    OmegaConf.save(OmegaConf.from_dotlist(overrides), tmp_path / "later.yaml")
    assert load_config([base, file, tmp_path / "later.yaml"]).environment.options == expected


def test_options_are_of_the_rule_that_they_stand_beside(base: Path, tmp_path: Path) -> None:
    file = tmp_path / "rule.yaml"
    file.write_text(RULE_FILE)
    written = load_config([base, file]).reward.options
    assert load_config([base, file], ["reward.rule=tagged", "reward.options.choices=[c]"]).reward.options == {
        "choices": ["c"]
    }
    term = "reward.options.terms.angle"
    other = load_config([base, file], [f"{term}.rule=rotation_broad"]).reward.options
    assert other["terms"]["angle"] == {"rule": "rotation_broad", "weight": 0.5}, "a term has options of its own"
    assert other["terms"]["accuracy"] == written["terms"]["accuracy"] and other["solved_by"] == "angle"
    same = load_config([base, file], [f"{term}.rule=rotation_strict", f"{term}.weight=1"]).reward.options
    assert same["terms"]["angle"] == {"rule": "rotation_strict", "weight": 1, "options": {"distance": "linear"}}


def test_options_beside_which_no_rule_stands_are_for_the_rule_that_is_named_later(base: Path, tmp_path: Path) -> None:
    file = tmp_path / "rule.yaml"
    file.write_text("reward:\n  options: {places: 3}\n")
    assert load_config([base, file], ["reward.rule=math_verify"]).reward.options == {"places": 3}
    assert load_config([base, file], ["reward.rule=tagged"]).reward.options == {"places": 3}


def test_dropping_options_leaves_interpolations_and_escapes(base: Path, tmp_path: Path) -> None:
    file = tmp_path / "rule.yaml"
    file.write_text("run:\n  dir: ${model.path}/\\${x}\nreward:\n  rule: tagged\n  options: {choices: [a]}\n")
    config = load_config([base, file], ["reward.rule=geometry3k"])
    assert config.run.dir == f"{config.model.path}/${{x}}" and config.reward.options == {}
