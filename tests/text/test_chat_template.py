import datetime
import json
from pathlib import Path
from typing import Any

import pytest

from prfaas.errors import BadRequest, ConfigError
from prfaas.text.chat_template import ChatTemplate

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ALTERNATING = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "[{{ message['content'] }}]{% endfor %}"
)


def user(text: object) -> dict[str, object]:
    return {"role": "user", "content": text}


def assistant(text: object) -> dict[str, object]:
    return {"role": "assistant", "content": text}


def write(directory: Path, **settings: object) -> Path:
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def test_a_conversation_is_written_as_the_template_says() -> None:
    template = ChatTemplate(CHATML)
    assert template.render([user("Hi"), assistant("Hello"), user("Bye")]) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"
        "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n"
    )
    assert not template.render([user("Hi")], add_generation_prompt=False).endswith("assistant\n")
    assert not template.is_plain
    assert template.adds_bos
    assert template.stop_strings == ()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "source",
    [
        CHATML,
        "{{ bos_token }}  {% if tools %}\n  {{ tools | tojson(indent=2) }}\n{% endif %}\n\n  x",
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m | tojson }}{% endfor %}",
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
        "{%- set ns = namespace(n=0) -%}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
        "{{ messages[0]['content'].strip().upper() ~ eos_token ~ undefined_name }}",
    ],
)
def test_text_is_that_of_transformers(source: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [user('Grüße <b> & "quotes" 😀\n'), assistant("ja"), user("x")]
    tools: list[Any] = [{"type": "function", "function": {"name": "f", "description": "naïve"}}]
    tokens: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>"}
    conversations: list[Any] = [messages]
    rendered: Any = render_jinja_template(
        conversations=conversations,
        chat_template=source,
        tools=tools,
        add_generation_prompt=True,
        **tokens,
    )
    template = ChatTemplate(source, tokens=tokens)
    given_tools = tools if template.takes_tools else None
    assert [template.render(messages, tools=given_tools)] == rendered[0]


def test_a_refusal_names_the_message_and_the_templates_words() -> None:
    template = ChatTemplate(ALTERNATING, tokens={"bos_token": "<s>"})
    assert template.render([user("a"), assistant("b")]) == "<s>[a][b]"
    with pytest.raises(BadRequest, match=r"messages\[2\].*must alternate") as caught:
        template.render([user("a"), assistant("b"), assistant("c"), user("d")])
    assert caught.value.param == "messages[2]"
    assert caught.value.status == 400


def test_a_refusal_of_a_long_conversation_costs_few_renderings() -> None:
    renderings = 0

    def count(message: str) -> str:
        nonlocal renderings
        renderings += 1
        return message

    template = ChatTemplate("{{ count('') }}" + ALTERNATING)
    assert template._template is not None
    template._template.globals["count"] = count
    with pytest.raises(BadRequest, match=r"messages\[777\]"):
        template.render([[user, assistant][i % 2 if i < 777 else 0](str(i)) for i in range(1000)])
    assert renderings < 15


@pytest.mark.parametrize(
    "source",
    [
        "{{ 1 / (messages | length - 1) }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[0].absent.more }}",
        "{{ messages[0]['content'].index('z') }}",
        "{{ '%d' | format(messages[0].content) }}",
        "{{ messages.append(1) }}",
        "{{ ().__class__.__base__.__subclasses__() }}",
        "{% for i in range(10000000) %}x{% endfor %}",
    ],
)
def test_whatever_a_template_raises_is_a_bad_request(source: str) -> None:
    with pytest.raises(BadRequest, match=r"messages\[0\]"):
        ChatTemplate(source).render([user("a")])


def test_a_request_cannot_bring_template_code() -> None:
    text = "{{ 7 * 7 }}{% raw %}"
    assert text in ChatTemplate(CHATML).render([user(text)])


def test_content_parts_are_joined_for_every_role() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    for role in ("system", "user", "assistant", "tool"):
        assert f"{role}\nab<" in ChatTemplate(CHATML).render([{"role": role, "content": parts}])


@pytest.mark.parametrize("message", [{}, {"content": None}, {"content": ""}, {"content": []}])
def test_a_turn_of_tool_calls_is_never_lost(message: dict[str, object]) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": "é"}'}}
    turn = {"role": "assistant", **message, "tool_calls": [call]}
    written = ChatTemplate(CHATML).render([user("q"), turn, {"role": "tool", "content": "r"}])
    assert 'assistant\n{"name": "f", "arguments": {"x": "é"}}<|im_end|>' in written
    knowing = ChatTemplate(
        "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.arguments.x }}{% endfor %}{% endfor %}"
    )
    assert knowing.render([user("q"), turn]) == "é"


@pytest.mark.parametrize("content", [3, {"a": 1}, [{"type": "image_url"}], ["text"], b"x"])
def test_content_that_is_no_text_is_named(content: object) -> None:
    for template in (ChatTemplate(CHATML), ChatTemplate(None)):
        with pytest.raises(BadRequest, match="neither a text nor a list") as caught:
            template.render([user("a"), user(content)])
        assert caught.value.param == "messages[1].content"


def test_developer_is_system_unless_the_template_knows_it() -> None:
    messages = [{"role": "developer", "content": "d"}]
    assert "system\nd" in ChatTemplate(CHATML).render(messages)
    source = "{% if messages[0].role == 'developer' %}known{% endif %}"
    assert ChatTemplate(source).render(messages) == "known"


def test_tools_reach_a_template_that_knows_them_and_no_other() -> None:
    tools = [{"type": "function", "function": {"name": "é<f>"}}]
    template = ChatTemplate("{% if tools %}{{ tools | tojson }}{% endif %}")
    assert template.takes_tools
    assert template.render([user("a")], tools=tools) == json.dumps(tools, ensure_ascii=False)
    for other in (ChatTemplate(CHATML), ChatTemplate(None)):
        assert other.render([user("a")], tools=[])
        with pytest.raises(BadRequest, match="tools") as caught:
            other.render([user("a")], tools=tools)
        assert caught.value.param == "tools"


def test_dates_come_from_the_clock() -> None:
    moment = datetime.datetime(2026, 1, 2, 12, tzinfo=datetime.UTC)
    template = ChatTemplate("{{ strftime_now('%Y-%m-%d') }}", wall=moment.timestamp)
    assert template.render([user("a")]) == moment.astimezone().strftime("%Y-%m-%d")


def test_the_file_wins_over_the_setting_and_the_override_over_both(tmp_path: Path) -> None:
    write(tmp_path, chat_template="setting", bos_token={"content": "<s>"}, eos_token="</s>")
    assert ChatTemplate.load(tmp_path).render([]) == "setting"
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}file{{ eos_token }}")
    assert ChatTemplate.load(tmp_path).render([]) == "<s>file</s>"
    override = tmp_path / "mine.jinja"
    override.write_text("{{ bos_token }}mine")
    assert ChatTemplate.load(tmp_path, override).render([]) == "<s>mine"


def test_of_several_templates_the_default_is_taken(tmp_path: Path) -> None:
    named = [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]
    assert ChatTemplate.load(write(tmp_path, chat_template=named)).render([]) == "d"


def test_a_checkpoint_without_a_template_gets_the_plain_transcript(tmp_path: Path) -> None:
    template = ChatTemplate.load(tmp_path)
    assert template.is_plain
    assert not template.adds_bos
    assert template.render([user("Why?")]) == "Question: Why?\nAnswer:"
    assert "\nQuestion:" in template.stop_strings


@pytest.mark.parametrize("setting", [3, [], [{"name": "rag", "template": "x"}], {"default": "x"}])
def test_a_setting_without_a_template_in_it_is_refused(tmp_path: Path, setting: object) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json.*chat_template"):
        ChatTemplate.load(write(tmp_path, chat_template=setting))


def test_a_template_that_is_not_valid_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "broken.jinja"
    path.write_text("fine\n{% for %}")
    with pytest.raises(ConfigError, match=r"broken\.jinja.*line 2"):
        ChatTemplate.load(tmp_path, path)


@pytest.mark.parametrize("content", [None, b"\xff\xfe{"])
def test_a_template_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "mine.jinja"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"mine\.jinja"):
        ChatTemplate.load(tmp_path, path)


def test_the_fingerprint_tells_templates_apart() -> None:
    prints = {ChatTemplate(source).fingerprint for source in (None, "", CHATML, CHATML + " ")}
    assert len(prints) == 4
    assert ChatTemplate(CHATML).fingerprint == ChatTemplate(CHATML).fingerprint


def test_the_text_of_a_conversation_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prfaas.text.chat_template.MAX_RENDERED_CHARACTERS", 1000)
    template = ChatTemplate("{% for m in messages %}{{ m.content * 10 }}{% endfor %}")
    assert len(template.render([user("a" * 99)])) == 990
    with pytest.raises(BadRequest, match=r"messages\[1\].*over 1000 characters"):
        template.render([user("a" * 99), user("aa")])
