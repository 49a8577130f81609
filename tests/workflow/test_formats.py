"""The forms of thinking and acting: what is in form, what is not, and what is read out of either."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_vlrl.workflow.environments.formats import THOUGHTS, Format
from npu_vlrl.workflow.thought import CLOSE, OPEN

FORMS = {
    "no_think": "<answer>A</answer>",
    "free_think": "<think>T</think><answer>A</answer>",
    "grounding": "<think><observation>O</observation><reasoning>R</reasoning></think><answer>A</answer>",
    "worldmodeling": "<think><reasoning>R</reasoning><prediction>P</prediction></think><answer>A</answer>",
    "grounding_worldmodeling": "<think><observation>O</observation><reasoning>R</reasoning>"
    "<prediction>P</prediction></think><answer>A</answer>",
}
"""Each format as VAGEN publishes it, with a letter in each part."""

LETTERS = {"T": "think", "O": "observation", "R": "reasoning", "P": "prediction"}


def pieces(name: str) -> list[str]:
    return re.findall(r"</?\w+>|[A-Z]", FORMS[name])


def test_every_format_is_tested() -> None:
    assert set(FORMS) == set(THOUGHTS)


@pytest.mark.parametrize("name", FORMS)
def test_the_published_form_is_right_with_any_white_space_between_tags(name: str) -> None:
    for text in (FORMS[name], "\n ".join(["", *pieces(name), ""])):
        parsed = Format(name).parse(text)
        assert parsed.right and parsed.answer == "A"
        assert parsed.thoughts == {part: letter for letter, part in LETTERS.items() if letter in pieces(name)}
    assert Format(name).form == re.sub("[A-Z]", "…", FORMS[name])


@pytest.mark.parametrize("name", FORMS)
def test_no_tag_may_be_missing_doubled_or_moved_and_no_text_may_stand_outside(name: str) -> None:
    form, whole = Format(name, opened=False), pieces(name)
    tags = [i for i, piece in enumerate(whole) if piece[0] == "<"]
    broken = [whole[:i] + whole[i + 1 :] for i in tags]
    broken += [[*whole[:i], whole[i], *whole[i:]] for i in tags]
    broken += [
        [*whole[:i], whole[j], *whole[i + 1 : j], whole[i], *whole[j + 1 :]] for i in tags for j in tags if i < j
    ]
    broken += [["x", *whole], [*whole, "x"]]
    broken += [[*whole[:i], "x", *whole[i:]] for i in tags[1:] if i - 1 in tags]
    assert len(broken) > 3 * len(tags)
    assert [text for text in map("".join, broken) if form.parse(text).right] == []
    # parts may be empty, or hold anything but tags of the format
    assert form.parse("".join(piece for piece in whole if piece[0] == "<")).right
    assert form.parse("".join(piece if piece[0] == "<" else "<b>\n1 < 2 & </b>" for piece in whole)).right


TOKENS = ["<think>", "</think>", "<observation>", "</observation>", "<reasoning>", "</reasoning>", "<prediction>"]
TOKENS += ["</prediction>", "<answer>", "</answer>", " ", "\n", "Up", "<", "think>", "<eoa>"]
GAP = r"\s*"
THOUGHT = {
    "free_think": ".*",
    "grounding": GAP.join(["", r"<observation>.*</observation>", r"<reasoning>.*</reasoning>", ""]),
}


def expected(name: str, text: str) -> bool:
    """The definition of a right text under a template that opens no thought, by regular expressions alone."""
    if name == "no_think":
        thought, after = "", text
    else:
        parts = re.fullmatch(r"\s*<think>(?!\s*<think>)(.*?)</think>(.*)", text, re.DOTALL)
        if parts is None:
            return False
        thought, after = parts.groups()
        inner = [tag for tag in pieces(name)[1:] if tag[0] == "<" and "think" not in tag and "answer" not in tag]
        if re.fullmatch(THOUGHT[name], thought, re.DOTALL) is None or any(text.count(tag) != 1 for tag in inner):
            return False
    form = re.fullmatch(r"\s*<answer>.*</answer>\s*", after, re.DOTALL)
    once = after.count("<answer>") == after.count("</answer>") == 1
    return form is not None and once and OPEN not in after and CLOSE not in after


@given(
    name=st.sampled_from(["no_think", *sorted(THOUGHT)]),
    tokens=st.lists(st.sampled_from(TOKENS), max_size=14),
    swaps=st.lists(st.tuples(st.integers(0, 30), st.sampled_from(TOKENS)), max_size=2),
    from_form=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_right_is_a_thought_and_an_answer_in_which_each_tag_stands_once(
    name: str, tokens: list[str], swaps: list[tuple[int, str]], from_form: bool
) -> None:
    if from_form:
        tokens = pieces(name)
        for place, token in swaps:
            tokens.insert(place % (len(tokens) + 1), token)
    text = "".join(tokens)
    assert Format(name, opened=False).parse(text).right == expected(name, text)


@given(st.text(max_size=40).filter(lambda text: "<" not in text))
@settings(max_examples=50)
def test_what_is_written_is_read_again(text: str) -> None:
    for name, parts in THOUGHTS.items():
        form = Format(name, "ans", "<eoa>")
        parsed = form.parse(form.write({**dict.fromkeys(parts, text), "ans": text}))
        assert parsed.right and parsed.answer == text.strip()
        assert parsed.thoughts == dict.fromkeys(parts, text.strip())


def test_the_early_form_with_a_token_that_ends_the_action() -> None:
    early = Format("free_think", "ans", "<eoa>")
    right = "<think>It is above.</think> <ans>Up</ans><eoa>"
    assert early.parse(right).right and early.parse(right).answer == "Up"
    for wrong in ("<think>a</think><ans>Up</ans>", right + "<eoa>", "<think>a</think><eoa><ans>Up</ans>", right + "."):
        assert not early.parse(wrong).right and early.parse(wrong).answer == "Up"
    assert early.parse("<think>a</think><answer>Up</answer><eoa>").answer is None
    assert early.form == "<think>…</think><ans>…</ans><eoa>"


def test_the_last_answer_counts_also_in_the_wrong_form() -> None:
    form = Format("grounding")
    for text, answer in {
        "<answer>Up</answer>": "Up",
        "<answer>Up</answer> no, <answer> Down </answer> it is": "Down",
        "<answer>Up</answer><answer>": "Up",
        "<answer><answer>Up</answer>": "Up",
        "<answer>Up</answer></answer>": "Up",
        "<answer>Left<answer>Up</answer></answer>": "Up",
        "</answer>Up<answer>": None,
        "<answer>Up": None,
        "Up": None,
        "": None,
    }.items():
        parsed = form.parse(text)
        assert (parsed.answer, parsed.right, parsed.thoughts) == (answer, False, {})
    assert form.parse("<reasoning>r</reasoning>").thoughts == {"reasoning": "r"}


def test_hostile_texts_cost_no_more_than_their_length() -> None:
    for name in FORMS:
        for evil in ("<think>", "<answer>", "</answer>", "<observation><reasoning>", "<", " ", "<think></think>"):
            parsed = Format(name).parse(evil * 200_000)
            assert not parsed.right and parsed.answer in (None, "")


def test_tags_that_cannot_be_told_apart_are_refused() -> None:
    for name, tag, end in [
        ("free_think", "think", ""),
        ("grounding", "reasoning", ""),
        ("no_think", "answer", "<answer>"),
        ("no_think", "answer", "</answer>!"),
        ("no_think", "answer", "wer>"),
        ("no_think", "answer", " <eoa>"),
        ("no_think", "think", ""),  # an answer is no thought
    ]:
        with pytest.raises(ValueError, match=r"cannot be told apart; choose another answer_tag or end_token"):
            Format(name, tag, end)


def test_the_policy_is_told_the_form_and_what_to_write_where() -> None:
    assert Format("no_think").instructions == "Write exactly in this form: <answer>…</answer>"
    assert Format("worldmodeling").instructions == (
        "Write exactly in this form: <think><reasoning>…</reasoning><prediction>…</prediction></think>"
        "<answer>…</answer> (in <reasoning> how you decide, in <prediction> what you expect to see next)"
    )


# Thoughts


@pytest.mark.parametrize("name", [name for name in FORMS if name != "no_think"])
def test_the_opening_tag_may_be_the_templates(name: str) -> None:
    """A policy samples none where the generation prompt ends with `<think>`."""
    sampled = FORMS[name].removeprefix("<think>")
    whole = Format(name).parse(FORMS[name])
    for text in (sampled, "\n" + sampled):
        assert Format(name).parse(text) == Format(name, opened=True).parse(text) == whole
    assert Format(name, opened=True).parse(f"<think>\n{sampled}") == whole  # as the workflow hands it on
    assert not Format(name, opened=False).parse(sampled).right  # nobody opened it
    assert Format(name, opened=True).write(
        dict.fromkeys(["think", "observation", "reasoning", "prediction", "answer"], "x")
    ) == (re.sub("[A-Z]", "x", sampled))


def test_a_policy_is_not_asked_for_a_tag_that_stands_there_already() -> None:
    form = Format("free_think", opened=True)
    assert form.form == "…</think><answer>…</answer>"
    assert form.instructions == (
        "<think> is written already. Go on exactly in this form: …</think><answer>…</answer> "
        "(in <think> what you think)"
    )
    assert Format("grounding", opened=True).form == (
        "<observation>…</observation><reasoning>…</reasoning></think><answer>…</answer>"
    )


def test_no_think_has_a_thought_only_where_the_template_opens_one() -> None:
    text = "<think>\nhm</think>\n\n<answer>Up</answer>"
    assert [Format("no_think", opened=opened).parse(text).right for opened in (True, False, None)] == [
        True,
        False,
        False,
    ]
    assert Format("no_think", opened=True).form == "</think><answer>…</answer>"
    assert Format("no_think", opened=True).parse(f"<think>\n{Format('no_think', opened=True).form}").right


@pytest.mark.parametrize("opened", [True, False, None])
def test_what_is_drafted_in_a_thought_is_no_answer(opened: bool | None) -> None:
    form = Format("free_think", opened=opened)
    drafted = form.parse("<think>Maybe <answer>Left</answer>. No.</think><answer>Up</answer>")
    assert (drafted.answer, drafted.right) == ("Up", True)
    only = form.parse("<think>Maybe <answer>Left</answer>. No.</think>Well.")
    assert (only.answer, only.right, only.unfinished) == (None, False, False)
    cut = form.parse("<think>\nMaybe <answer>Left</answer>")
    assert (cut.answer, cut.right, cut.unfinished, cut.thoughts) == (None, False, True, {})


@pytest.mark.parametrize(
    "text",
    [
        "<think><think>a</think><answer>Up</answer>",  # a second opening
        "<think>a</think><think>b</think><answer>Up</answer>",
        "<think>a <think>b</think> c</think><answer>Up</answer>",
        "<think>a</think><answer>Up</answer> </think>",
        "<think>a</think><answer>Up</answer> <think>",
        "well <think>a</think><answer>Up</answer>",
    ],
)
def test_thoughts_that_are_not_in_the_format(text: str) -> None:
    parsed = Format("free_think").parse(text)
    assert (parsed.right, parsed.answer) == (False, "Up")
    assert Format("free_think").parse("<think>Tags: <think> and so on.</think><answer>Up</answer>").right
