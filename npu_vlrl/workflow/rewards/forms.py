"""Forms of reward functions: our own, and those that other trainers publish, distinguished by parameter names.

A function is called with the parameters that it names, never by position: four parameters of other names are not taken
for ours. The forms, as of the versions in docs/comparison.md:

- ours: any of task, text, history, images
- verl: any of data_source, solution_str, ground_truth, extra_info; or their plurals, lists, for a whole batch
- TRL: prompts and completions, lists; others receive the columns of a row by name, lists too. Returns a list of numbers
- EasyR1: reward_input, a dict of response and ground_truth, or reward_inputs, a list of them. Returns a dict, or a list
  of dicts, with `overall`
- AReaL: prompt, completions, prompt_ids, completion_ids; others receive the fields of a row by name. Returns a number
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple

from PIL import Image as Pillow

from npu_vlrl.workflow.texts import shown


class FormError(Exception):
    """Raised when a function was called in its form, and the call or the result does not fit."""


class Asked(NamedTuple):
    """An answer to be scored, with everything that a function may receive about it."""

    task: Mapping[str, Any]
    """Entries id, answer, data_source and extra of the task."""
    text: str
    history: Sequence[str]
    """Texts of the earlier turns."""
    images: Sequence[Pillow.Image]
    """RGB images of the episode in the order the model saw them."""
    messages: Sequence[tuple[str, str]] = ()
    """Role and text of each message of the task."""


class Chat(str):
    """List of chat messages that is also their text: TRL passes a function either, depending on the data.

    As a text it is the messages' content; `chat[0]["content"]` and `chat[-1]["role"]` read it as a list of messages. An
    operation that differs between the two raises TypeError.
    """

    messages: Sequence[Mapping[str, str]]

    def __new__(cls, messages: Sequence[tuple[str, str]]) -> Chat:
        made = super().__new__(cls, "\n".join(text for _, text in messages))
        made.messages = [_Message(role=role, content=text) for role, text in messages]
        return made

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index) if isinstance(index, slice) else self.messages[index]

    def __iter__(self) -> Any:
        raise TypeError("this is a text and a list of messages; write str(…), or …[0], instead of going through it")


class _Message(dict[str, str]):
    def __eq__(self, other: object) -> bool:
        if isinstance(other, str):
            raise TypeError("this is a message, not a character; write str(…)[0] for the first one")
        return super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None


class Unknown:
    """Placeholder for an argument of a form that is unknown to a judge, which sees texts; any use raises FormError."""

    def __init__(self, name: str) -> None:
        self._name = name

    def _raise(self, *_: Any) -> Any:
        raise FormError(f"it uses {self._name}, and a reward is told texts and no tokens; do without it")

    __len__ = __iter__ = __getitem__ = __bool__ = __contains__ = __getattr__ = _raise


class _RewardInput(dict[str, Any]):
    """Input of EasyR1's form; a missing key raises FormError with its name."""

    def __missing__(self, key: str) -> Any:
        raise FormError(f"it uses {key!r} of its input, where only {', '.join(self)} are known; do without it")


@dataclass(frozen=True)
class Form:
    """One form of reward functions."""

    written: str
    """Signature for messages."""
    recognised: Callable[[frozenset[str]], bool]
    """Whether a function with parameters of these names has this form."""
    given: Callable[[Asked], dict[str, Any]]
    """Arguments of the call, by name."""
    returned: Callable[[Any], Any] = lambda result: result
    """Converts the function's result to that of our own form."""
    columns: bool = False
    """Whether other parameters are columns of the row, which are known only once there is one."""


def adapted(function: Callable[..., Any], name: str) -> Callable[[Asked], Any]:
    """Adapts `function` to the form in which our code calls it.

    Raises ValueError, naming the function, its parameters and the forms, for a function of no form, or with parameters
    that are unknown here. The result raises FormError for a missing column and for a result that does not fit its form.
    """
    parameters = inspect.signature(function).parameters.values()
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    required = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    form = next((form for form in FORMS if form.recognised(frozenset(named))), None)
    if form is None:
        raise _refused(function, name, "these parameters are of none of the forms")
    known = set(form.given(_NOTHING))
    columns = set(named) - TRAINER if form.columns else set()
    unknown = [key for key in required if key not in named or key not in known | columns]
    # one with a default would keep it for ever, although it is meant to be filled
    unknown += [key for key in named if key in CORE - known and not form.columns and key not in unknown]
    if unknown:
        raise _refused(function, name, f"{', '.join(unknown)} cannot be given in {form.written}")
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)

    def call(asked: Asked) -> Any:
        given = form.given(asked)
        missing = [key for key in required if key not in given]
        if missing:
            raise FormError(
                f"it takes {', '.join(missing)}, and the task has only {', '.join(given)}; put that in extra_info, or "
                "give it a default"
            )
        return form.returned(function(**{key: value for key, value in given.items() if takes_all or key in named}))

    return call


def _refused(function: Callable[..., Any], name: str, why: str) -> ValueError:
    others = ", ".join(form.written for form in reversed(FORMS[:-1]))
    return ValueError(
        f"{name} takes {inspect.signature(function)}; write it as def {function.__name__}({', '.join(OURS)}), or with "
        f"{others}, any part of which will do: {why}"
    )


def _from_verl(result: Any) -> Any:
    """Converts verl's result with `score`: its other numbers become terms."""
    if not isinstance(result, Mapping) or "score" not in result:
        return result
    return {"reward": result["score"], "terms": _numbers(result, "score")}


def _from_easyr1(result: Any) -> Any:
    """Converts EasyR1's result; solved by its `accuracy`, where it has one, because `overall` holds bonuses."""
    if not isinstance(result, Mapping) or "overall" not in result:
        raise FormError(f"it returned {shown(result)}, and EasyR1's form returns a dict with 'overall'")
    terms = _numbers(result, "overall")
    solved = {"solved": terms["accuracy"] >= 1.0} if "accuracy" in terms else {}
    return {"reward": result["overall"], "terms": terms, **solved}


def _the_only(returned: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Converts a result for a batch, which here has one answer."""

    def only(result: Any) -> Any:
        if isinstance(result, str | Mapping) or not hasattr(result, "__len__") or len(result) != 1:
            raise FormError(
                f"it returned {shown(result)}, and was asked about a list of one answer; return a list of one"
            )
        return returned(result[0])

    return only


def _numbers(result: Mapping[str, Any], reward: str) -> dict[str, Any]:
    return {key: value for key, value in result.items() if key != reward and isinstance(scalar(value), Real)}


def scalar(value: Any) -> Any:
    """Converts a NumPy or torch scalar to a Python scalar; returns anything else unchanged."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


def _row(asked: Asked) -> dict[str, Any]:
    """Columns of a row; the right answer appears under all of its usual names."""
    task = asked.task
    fields = {"id": task["id"], "data_source": task["data_source"], "images": list(asked.images)}
    return {**dict.fromkeys(("answer", "solution", "ground_truth"), task["answer"]), **fields, **task["extra"]}


def _ours(asked: Asked) -> dict[str, Any]:
    return {"task": asked.task, "text": asked.text, "history": asked.history, "images": asked.images}


def _verl(asked: Asked) -> dict[str, Any]:
    task = asked.task
    return {
        "data_source": task["data_source"],
        "solution_str": asked.text,
        "ground_truth": task["answer"],
        "extra_info": task["extra"],
    }


def _verl_batch(asked: Asked) -> dict[str, Any]:
    one = _verl(asked)
    return dict(zip(VERL_BATCH, ([value] for value in one.values()), strict=True))


def _trl(asked: Asked) -> dict[str, Any]:
    batch = {"prompts": [Chat(asked.messages)], "completions": [Chat([("assistant", asked.text)])]}
    return {**{key: [value] for key, value in _row(asked).items()}, **batch}


def _easyr1(asked: Asked) -> dict[str, Any]:
    one = _RewardInput(response=asked.text, ground_truth=asked.task["answer"])
    return {"reward_input": one}


def _easyr1_batch(asked: Asked) -> dict[str, Any]:
    return {"reward_inputs": [_easyr1(asked)["reward_input"]]}


def _areal(asked: Asked) -> dict[str, Any]:
    """Arguments of AReaL's form. Its prompt is a text, there with the tokens of the chat template and here without.
    Token ids stand in every signature, since they are passed by position, and hardly any function uses them.
    """
    tokens = {name: Unknown(name) for name in ("prompt_ids", "completion_ids")}
    return {**_row(asked), "prompt": str(Chat(asked.messages)), "completions": asked.text, **tokens}


def _any_of(*marks: str) -> Callable[[frozenset[str]], bool]:
    return lambda names: not names.isdisjoint(marks)


OURS = ("task", "text", "history", "images")
VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
VERL_BATCH = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
CORE = frozenset({*OURS, *VERL, *VERL_BATCH, "prompts", "completions", "reward_input", "reward_inputs"})
"""Parameter names by which forms are distinguished."""

TRAINER = frozenset({"completion_ids", "completions_ids", "trainer_state", "log_extra", "log_metric", "environments"})
"""Parameters that TRL passes besides columns; they are unknown here."""

_NOTHING = Asked({"id": "", "answer": None, "data_source": "", "extra": {}}, "", (), ())

FORMS = (
    Form(
        "AReaL's (prompt, completions, prompt_ids, completion_ids, answer, …)",
        lambda names: {"prompt", "completions"} <= names,
        _areal,
        columns=True,
    ),
    Form(
        "TRL's (completions, **kwargs)",
        _any_of("prompts", "completions"),
        _trl,
        _the_only(lambda reward: reward),
        columns=True,
    ),
    Form("EasyR1's (reward_inputs)", _any_of("reward_inputs"), _easyr1_batch, _the_only(_from_easyr1)),
    Form("EasyR1's (reward_input)", _any_of("reward_input"), _easyr1, _from_easyr1),
    Form(f"verl's ({', '.join(VERL)})", _any_of(*VERL), _verl, _from_verl),
    Form(f"verl's ({', '.join(VERL_BATCH)})", _any_of(*VERL_BATCH), _verl_batch, _the_only(_from_verl)),
    Form(f"ours ({', '.join(OURS)})", _any_of(*OURS), _ours),
)
