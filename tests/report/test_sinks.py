"""What sinks are told, what a failing one does to a run, and TensorBoard's own reader on what it was given."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
from PIL import Image as Pillow
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from npu_vlrl.config import Config, ConfigError
from npu_vlrl.config.extras import EXTRAS
from npu_vlrl.report.sinks import CaptionedImage, Opening, Sinks, check_installed
from npu_vlrl.report.sinks.sinks import MAX_IMAGES, images_of
from npu_vlrl.types import EpisodeStatus, Trajectory, Verdict
from tests.support.opening import CONFIG, record
from tests.support.scripted import Verdicts, a_task, an_image, play, workflow

ROOT = Path(__file__).parents[2]


class Noting:
    """A sink that notes what it is told, and fails when asked to."""

    def __init__(self, fails: str = "") -> None:
        self.told: list[Any] = []
        self.fails = fails

    def _note(self, what: str, *told: Any) -> None:
        if self.fails == what:
            raise OSError("no network")
        self.told.append(told)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._note("scalars", step, dict(values))

    def images(self, step: int, images: Sequence[CaptionedImage]) -> None:
        self._note("images", step, [image.caption for image in images])

    def close(self, error: str | None) -> None:
        self._note("close", error)


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Makes `Sinks` of objects: `given(a=Noting(), b=…)`; what they tell is in `told`."""
    told: list[str] = []

    def make(**sinks: Any) -> Sinks:
        def module(name: str) -> Any:
            own = sinks[name.rpartition(".")[2].removesuffix("_sink")]
            return SimpleNamespace(open_sink=own if callable(own) else lambda opening: own)

        monkeypatch.setattr("npu_vlrl.report.sinks.sinks.import_module", module)
        return Sinks(list(sinks), lambda name: Opening.of(tmp_path, name, CONFIG, 0, False), told.append)

    make.told = told  # type: ignore[attr-defined]
    return make


def episode() -> Trajectory:
    settings: dict[str, Any] = {"tools": ("look",), "describe_tools": False}
    call = '<tool_call>{"name":"look","arguments":{}}</tool_call>'
    task = a_task(an_image(28), "Which?", hidden_image=an_image(56))
    return play(workflow(Verdicts([Verdict(0.75, True)]), **settings), [call, "up\n"], task)


def test_all_sinks_are_told_all(given: Any) -> None:
    one, other = Noting(), Noting()
    with given(one=one, other=other) as sinks:
        sinks.scalars(3, {"reward": 0.5, "eval/all/accuracy": 1, "kl": float("nan"), "gap": float("inf")})
        sinks.trajectory(3, episode())
    caption = "'up\\n', right answer 'up', reward 0.75, solved, g/0"
    assert one.told == other.told
    assert one.told == [
        (3, {"train/reward": 0.5, "eval/all/accuracy": 1}),
        (3, [caption, caption]),
        (None,),
    ]
    assert given.told == []


def test_sinks_learn_how_a_run_ended(given: Any) -> None:
    sink = Noting()
    with pytest.raises(KeyError), given(one=sink):
        raise KeyError("gone")
    assert sink.told == [("KeyError: 'gone'",)]


@pytest.mark.parametrize("when", ["scalars", "images", "close"])
def test_a_sink_that_fails_is_told_of_once_and_the_others_go_on(given: Any, when: str) -> None:
    bad, good = Noting(when), Noting()
    with given(bad=bad, good=good) as sinks:
        for step in range(3):
            sinks.scalars(step, {"reward": 1.0})
            sinks.trajectory(step, episode())
    assert given.told == ["run.sinks: bad failed (no network) and gets nothing more; the run goes on without it"]
    assert len(good.told) == 7


def test_a_sink_that_cannot_begin_is_refused_and_the_others_are_closed(given: Any) -> None:
    good = Noting()

    def cannot(opening: Opening) -> None:
        raise RuntimeError("log in first")

    with pytest.raises(ConfigError, match=r"^run\.sinks: bad cannot begin: log in first; mend that, or leave it out$"):
        given(good=good, bad=cannot)
    assert good.told == [("RuntimeError: log in first",)]


def test_ids_stay_with_the_run_folder(tmp_path: Path) -> None:
    first = Opening.of(tmp_path / "run", "wandb", CONFIG, 0, False)
    assert re.fullmatch("[0-9a-f]{32}", first.id) and not first.resumed
    other = Opening.of(tmp_path / "run", "swanlab", CONFIG, 4, True)  # chosen when the run was resumed
    assert other.id != first.id and not other.resumed
    again = Opening.of(tmp_path / "run", "wandb", CONFIG, 4, True)
    assert again == replace(first, first_step=4, resumed=True)
    assert json.loads((tmp_path / "run" / "sinks.json").read_text()) == {"wandb": first.id, "swanlab": other.id}
    assert Opening.of(tmp_path / "run", "wandb", CONFIG, 0, False).id != first.id  # a start that failed left the file


def test_images_are_what_the_model_saw() -> None:
    done = episode()
    shown = images_of(done)
    assert [p.rgb.shape for p in shown] == [(28, 28, 3), (56, 56, 3)]
    np.testing.assert_array_equal(shown[0].rgb, done.task.images[0].rgb)
    assert images_of(Trajectory(a_task("?"), "g", 0, (), EpisodeStatus.FAILED)) == []
    task = a_task(*(an_image(28, seed) for seed in range(MAX_IMAGES + 1)), "Which?")
    assert len(images_of(play(workflow(Verdicts([Verdict(1.0, True)])), ["up"], task))) == MAX_IMAGES


def test_a_missing_package_is_named_with_what_to_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("npu_vlrl.report.sinks.sinks.find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"run\.sinks: swanlab is not installed: pip install 'npu-vlrl\[swanlab\]', or"
    ):
        check_installed(["swanlab"])
    monkeypatch.undo()
    check_installed(["tensorboard"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(EXTRAS, "a_service", "a_service")
    (tmp_path / "a_service").mkdir()  # files of a service are no package
    with pytest.raises(ConfigError, match="a_service is not installed"):
        check_installed(["a_service"])


def test_every_sink_has_an_extra_and_a_pin() -> None:
    run = Config.model_fields["run"].annotation
    assert run is not None
    sinks = get_args(get_args(run.model_fields["sinks"].annotation)[0])
    assert {name: EXTRAS.get(name) for name in sinks} == {name: name for name in sinks}
    pinned = re.findall(r"^([a-z]+)==", (ROOT / "requirements-sinks.txt").read_text(), re.MULTILINE)
    assert sorted(pinned) == sorted(sinks)


def events(folder: Path) -> EventAccumulator:
    found = EventAccumulator(str(folder / "tensorboard"), {"scalars": 0, "images": 0, "tensors": 0})
    found.Reload()
    return found


def text(found: EventAccumulator, tag: str) -> list[tuple[int, str]]:
    return [(e.step, e.tensor_proto.string_val[0].decode()) for e in found.Tensors(f"{tag}/text_summary")]


def test_tensorboard_reads_what_it_was_given(tmp_path: Path) -> None:
    def session(first: int, resumed: bool, steps: range, error: str | None = None) -> None:
        def opening(name: str) -> Opening:
            return Opening.of(tmp_path, name, CONFIG, first, resumed)

        with pytest.raises(RuntimeError) if error else nullcontext(), Sinks(["tensorboard"], opening, print) as sinks:
            for step in steps:
                record(sinks, step)
            if error:
                raise RuntimeError(error)

    session(0, False, range(0, 5), "burnt")
    found = events(tmp_path)
    assert text(found, "state") == [(4, "    RuntimeError: burnt")]
    session(3, True, range(3, 6))  # the last checkpoint was of step 3: two steps are done again
    found = events(tmp_path)
    assert set(found.Tags()["scalars"]) == {"train/reward", "eval/all/accuracy"}
    scalars = [(e.step, e.value) for e in found.Scalars("train/reward")]
    assert scalars == [(step, step / 4) for step in range(6)]
    assert json.loads(text(found, "config")[0][1]) == CONFIG
    assert text(found, "state") == [(4, "    RuntimeError: burnt"), (5, "finished")]  # texts are never forgotten
    assert text(found, "trajectory/caption")[-1] == (5, "    'up', right answer 'up', reward 5, solved")
    for number, shade in ((0, 5), (1, 105)):
        shown = found.Images(f"trajectory/{number}")[-1]
        with Pillow.open(io.BytesIO(shown.encoded_image_string)) as decoded:
            np.testing.assert_array_equal(np.array(decoded), np.full((6, 8, 3), shade))
