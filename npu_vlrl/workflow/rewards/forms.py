"""Forms of reward functions: our own, and those that other trainers publish, told apart by the names of parameters.

A function is called with the parameters that it names, never by position: one that takes four of any name is no reason
to believe that they are ours. The forms, as of the versions in docs/comparison.md:

- ours: any of task, text, history, images
- verl: any of data_source, solution_str, ground_truth, extra_info; or their plurals, lists, for a whole batch
- TRL: prompts and completions, lists; by their names the columns of a row, lists too. Returns a list of numbers
- EasyR1: reward_input, a dict of response and ground_truth, or reward_inputs, a list of them. Returns a dict, or a list
  of dicts, with `overall`
- AReaL: prompt, completions, prompt_ids, completion_ids; by their names the fields of a row. Returns a number
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
    """A function was called in its form, and the call or the result does not fit."""


class Asked(NamedTuple):
    """An answer, and all that a function may be told about it."""

    task: Mapping[str, Any]
    """id, answer, data_source and extra."""
    text: str
    history: Sequence[str]
    """Texts of the earlier turns."""
    images: Sequence[Pillow.Image]
    """RGB pictures of the episode in the order the model saw them."""
    messages: Sequence[tuple[str, str]] = ()
    """Role and text of the messages of the task."""


class Chat(str):
    """Messages of a chat that are their text, too: TRL gives a function either, depending on the data.

    As a text it is what the messages say; `chat[0]["content"]` and `chat[-1]["role"]` are those of a list of messages.
    What would mean another thing for each of the two raises TypeError.
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
    """Stands for what a form names and a judge is not told, since it sees texts: any use of it raises, and says so."""

    def __init__(self, name: str) -> None:
        self._name = name

    def _raise(self, *_: Any) -> Any:
        raise FormError(f"it uses {self._name}, and a reward is told texts and no tokens; do without it")

    __len__ = __iter__ = __getitem__ = __bool__ = __contains__ = __getattr__ = _raise


class _RewardInput(dict[str, Any]):
    """An EasyR1 input; what is missing is said by name."""

    def __missing__(self, key: str) -> Any:
        raise FormError(f"it uses {key!r} of its input, where only {', '.join(self)} are known; do without it")


@dataclass(frozen=True)
class Form:
    """One way to write a reward function."""

    written: str
    """For messages."""
    recognised: Callable[[frozenset[str]], bool]
    """Whether a function whose parameters have these names is of this form."""
    given: Callable[[Asked], dict[str, Any]]
    """The arguments, by name."""
    returned: Callable[[Any], Any] = lambda result: result
    """What the function returned, as our own form returns it."""
    columns: bool = False
    """Any other name is a column of the row, which is known only once there is one."""


def adapted(function: Callable[..., Any], name: str) -> Callable[[Asked], Any]:
    """`function` as our own code calls it.

    Raises ValueError, naming the function, its parameters and the forms, for one that is of none of them or asks for
    what is not known here. The result raises FormError for a missing column and for what does not fit its form.
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
    """The other numbers of a result with `score` are its terms."""
    if not isinstance(result, Mapping) or "score" not in result:
        return result
    return {"reward": result["score"], "terms": _numbers(result, "score")}


def _from_easyr1(result: Any) -> Any:
    """Solved as its `accuracy` says, where it has one: `overall` holds bonuses."""
    if not isinstance(result, Mapping) or "overall" not in result:
        raise FormError(f"it returned {shown(result)}, and EasyR1's form returns a dict with 'overall'")
    terms = _numbers(result, "overall")
    solved = {"solved": terms["accuracy"] >= 1.0} if "accuracy" in terms else {}
    return {"reward": result["overall"], "terms": terms, **solved}


def _the_only(returned: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """For forms that answer for a batch, which here has one answer."""

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
    """A Python scalar for a NumPy or torch scalar; anything else as it is."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


def _row(asked: Asked) -> dict[str, Any]:
    """The columns of a row; the right answer by the names that are usual for it."""
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
    """Its prompt is a text with the tokens of the chat template, and here one without. Token ids stand in every
    signature, since they are given by position, and hardly any function uses them.
    """
    tokens = {name: Unknown(name) for name in ("prompt_ids", "completion_ids")}
    return {**_row(asked), "prompt": str(Chat(asked.messages)), "completions": asked.text, **tokens}


def _any_of(*marks: str) -> Callable[[frozenset[str]], bool]:
    return lambda names: not names.isdisjoint(marks)


OURS = ("task", "text", "history", "images")
VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
VERL_BATCH = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
CORE = frozenset({*OURS, *VERL, *VERL_BATCH, "prompts", "completions", "reward_input", "reward_inputs"})
"""Names by which forms are told apart."""

TRAINER = frozenset({"completion_ids", "completions_ids", "trainer_state", "log_extra", "log_metric", "environments"})
"""What TRL gives besides columns, and nobody knows here."""

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
