import pytest

from prfaas.errors import BadRequest
from prfaas.text.plain_template import PLAIN_STOP_STRINGS, render_plain
from prfaas.text.stops import StopMatcher


def message(role: str, content: object, **fields: object) -> dict[str, object]:
    return {"role": role, "content": content, **fields}


def test_turns_become_questions_and_answers_after_the_system_text() -> None:
    messages = [
        message("system", "Be brief."),
        message("user", " What is 1+1? "),
        message("assistant", "2"),
        message("user", "And 2+2?"),
    ]
    assert render_plain(messages, add_generation_prompt=True) == (
        "Be brief.\n\nQuestion: What is 1+1?\nAnswer: 2\n\nQuestion: And 2+2?\nAnswer:"
    )


def test_without_a_generation_prompt_the_last_turn_ends_the_text() -> None:
    messages = [message("user", "a"), message("assistant", "b")]
    assert render_plain(messages, add_generation_prompt=False) == "Question: a\nAnswer: b\n\n"


def test_the_next_turn_continues_the_text_of_this_one() -> None:
    first = [message("developer", "d"), message("user", "a")]
    prompt = render_plain(first, add_generation_prompt=True)
    longer = [*first, message("assistant", "answer"), message("user", "b")]
    assert render_plain(longer, add_generation_prompt=True).startswith(prompt + " answer")


def test_tool_calls_and_results_are_shown() -> None:
    call = {"function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        message("user", "1+1?"),
        message("assistant", None, tool_calls=[call]),
        message("tool", "2", tool_call_id="1"),
    ]
    assert render_plain(messages, add_generation_prompt=True) == (
        'Question: 1+1?\nAnswer: {"name": "add", "arguments": {"a": 1}}\n\nResult: 2\nAnswer:'
    )


def test_an_unknown_role_is_named() -> None:
    with pytest.raises(BadRequest, match="ADMIN") as caught:
        render_plain([message("user", "a"), message("ADMIN", "b")], add_generation_prompt=True)
    assert caught.value.param == "messages[1].role"


@pytest.mark.parametrize("gap", ["\n", "\n\n"])
def test_the_models_next_question_is_cut_off_with_its_gap(gap: str) -> None:
    matcher = StopMatcher(PLAIN_STOP_STRINGS)
    assert matcher.push(f" Paris.{gap}Question: next") == (" Paris.", True)
