"""Service of a judge pool: answers `{"answer", "text", …}` with `{"verdict": …}`, a gold with `{"verdict": null}`.

A faulty gold gives `{"data_error": …}`; a failing rule or user's function gives `{"error": …}`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from npu_vlrl.common.registry import RULES, load
from npu_vlrl.types import DataError, Image, JudgeError, Verdict
from npu_vlrl.workflow.workers import load_function
from npu_vlrl.workflow.workers.serve import Handler
from npu_vlrl.workflow.workers.wire import Content

Rule = Callable[[Content, Sequence[Image]], Verdict | None]


def open_service(setup: Mapping[str, Any]) -> tuple[bool, Handler]:
    """Opens the service of `setup`: rule and options. Raises ValueError when a user's function cannot be used."""
    module = load(RULES, setup["rule"])
    make = _users_function if setup["rule"] == "python" else _builtin_rule
    rule = make(module, setup["options"])

    def handle(request: Content, images: Sequence[Image]) -> tuple[Content, Sequence[Image]]:
        try:
            verdict = rule(request, images)
        except DataError as error:
            return {"data_error": str(error)}, ()
        except JudgeError as error:
            return {"error": str(error)}, ()
        return {"verdict": None if verdict is None else dataclasses.asdict(verdict)}, ()

    return True, handle


def _builtin_rule(module: Any, options: Mapping[str, Any]) -> Rule:
    return lambda request, _: (
        module.score(**request, **options) if "text" in request else module.check_gold(request["answer"], **options)
    )


def _users_function(module: Any, options: Mapping[str, Any]) -> Rule:
    from PIL import Image as Pillow  # only users' functions look at images

    from npu_vlrl.workflow.rewards.forms import Asked, adapted

    name = options["function"]
    function = adapted(load_function(name), name)

    def judge(request: Content, images: Sequence[Image]) -> Verdict:
        pil_images = [Pillow.fromarray(image.rgb) for image in images]
        messages = [(role, text) for role, text in request["messages"]]
        asked = Asked(request["task"], request["text"], request["history"], pil_images, messages)
        verdict: Verdict = module.score(function, name, asked)
        return verdict

    return judge
