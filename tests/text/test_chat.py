from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from quire.text.chat import ChatTemplates, compile_template, read_template
from quire.types.errors import InvalidParameter, NotSupported, RequestError

CHATML = (
    "{% for message in messages %}{{ '<' + message['role'] + '>' + message['content'] + '</>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
PARTS = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'text' %}[{{ part.text }}]{% else %}({{ part.type }}){% endif %}"
    "{% endfor %}{% endif %};{% endfor %}"
)
HELLO = [{"role": "user", "content": "Hello"}]


def render(template: str, messages: Any = HELLO, **options: Any) -> str:
    return ChatTemplates({"default": template}).render(messages, **options)


def test_a_conversation_becomes_a_prompt() -> None:
    messages = [*HELLO, {"role": "assistant", "content": "Hi"}]
    assert render(CHATML, messages) == "<user>Hello</><assistant>Hi</>"
    assert render(CHATML, add_generation_prompt=True) == "<user>Hello</><assistant>"


def test_blocks_are_trimmed_and_loops_can_be_left() -> None:
    template = (
        "{% for m in messages %}\n  {% if loop.index > 1 %}\n  {% break %}\n  {% endif %}\n{{ m.content }}\n{% endfor %}\nend"
    )
    assert render(template, HELLO * 3) == "Hello\nend"


def test_tojson_is_plain_json() -> None:
    tools = [{"name": "<ü>", "b": 1, "a": "'"}]
    assert render("{{ tools | tojson }}", tools=tools) == '[{"name": "<ü>", "b": 1, "a": "\'"}]'
    assert render("{{ tools[0] | tojson(indent=2) }}", tools=tools) == '{\n  "name": "<ü>",\n  "b": 1,\n  "a": "\'"\n}'


def test_documents_and_own_variables_reach_the_template() -> None:
    template = "{{ documents[0].text }}{{ enable_thinking }}{{ tools is none }}"
    assert render(template, documents=[{"text": "page"}], variables={"enable_thinking": False}) == "pageFalseTrue"


def test_the_date_can_be_asked() -> None:
    assert render("{{ strftime_now('%Y') }}") in (str(datetime.now().year), str(datetime.now().year - 1))


def test_generation_blocks_are_their_bodies() -> None:
    assert render("a{% generation %}{{ messages[0].content }}{% endgeneration %}b") == "aHellob"


def test_a_template_can_refuse() -> None:
    with pytest.raises(RequestError, match=r"^roles must alternate$"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{% for %}", "not valid Jinja"),
        ("{{ messages[0].nothing.more }}", "cannot render"),
        ("{{ 'a' + 1 }}", "cannot render"),
        ("{{ messages.append(1) }}", "cannot render"),
        ("{{ ''.__class__.__mro__ }}", "cannot render"),
        ("{{ range(10000000) | list }}", "cannot render"),
        ("{{ 'a' * 10**9 }}", "cannot render"),
        ("{{ 9 ** 99999 }}", "cannot render"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{{ 'a' * 1000 }}{% endfor %}{% endfor %}", "wrote more than"),
    ],
)
def test_a_broken_or_hostile_template_is_the_requests_error(template: str, why: str) -> None:
    with pytest.raises(RequestError, match=why):
        render(template)


def test_templates_are_compiled_once() -> None:
    assert compile_template(CHATML) is compile_template(CHATML)


def test_named_templates() -> None:
    templates = ChatTemplates({"default": "plain", "tool_use": "tools", "rag": "rag"})
    assert templates.render(HELLO) == "plain"
    assert templates.render(HELLO, tools=[{"name": "f"}]) == "tools"
    assert templates.render(HELLO, tools=[]) == "plain"
    assert templates.render(HELLO, chat_template="rag") == "rag"
    assert templates.render(HELLO, chat_template="{{ messages | length }}") == "1"
    with pytest.raises(RequestError, match=r"one of \['a', 'b'\]"):
        ChatTemplates({"a": "", "b": ""}).render(HELLO)


def test_without_a_template_the_error_says_what_to_pass() -> None:
    with pytest.raises(RequestError, match="chat_template="):
        ChatTemplates({}).render(HELLO)


@pytest.mark.parametrize(
    "content", ["The answer  is ", "", " leading", "twice twice", "line\n\n", [{"type": "text", "text": "The answer is "}]]
)
@pytest.mark.parametrize("template", [CHATML, CHATML.replace("message['content']", "(message['content'] | trim)")])
def test_the_final_message_ends_the_prompt_exactly(template: str, content: Any) -> None:
    text = content if isinstance(content, str) else content[0]["text"]
    prompt = render(template, [*HELLO, {"role": "assistant", "content": content}], continue_final_message=True)
    assert prompt == "<user>Hello</><assistant>" + (text.lstrip() if "trim" in template else text)


def test_a_template_with_parts_can_be_continued() -> None:
    messages = [*HELLO, {"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b "}]}]
    assert render(PARTS, messages, continue_final_message=True) == "Hello;[a][b "


def test_what_cannot_be_continued_is_refused() -> None:
    with pytest.raises(RequestError, match="set only one"):
        render(CHATML, continue_final_message=True, add_generation_prompt=True)
    with pytest.raises(RequestError, match="changes it or leaves it out"):
        render("{{ messages[-1].content | upper }}", continue_final_message=True)
    with pytest.raises(RequestError, match="changes it or leaves it out"):
        render("nothing", continue_final_message=True)
    with pytest.raises(RequestError, match="content is text"):
        render(CHATML, [{"role": "assistant", "content": None}], continue_final_message=True)


def test_text_parts_are_flattened_for_templates_that_expect_strings() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, "b", {"type": "input_text", "text": "c"}]}]
    assert render(CHATML, messages) == "<user>a\nb\nc</>"
    assert messages[0]["content"][1] == "b"  # and what was given is left alone
    with pytest.raises(NotSupported, match="image_url"):
        render(CHATML, [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}])


def test_parts_are_passed_on_to_templates_that_read_them() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}, *HELLO]
    assert render(PARTS, messages) == "[a](image);Hello;"


def test_text_parts_of_any_name_reach_templates_that_read_parts() -> None:
    texts = ["a", {"type": "input_text", "text": "b"}, {"type": "output_text", "text": "c"}]
    parts = [*texts, {"type": "refusal", "refusal": "d"}, {"type": "image"}]
    assert render(PARTS, [{"role": "user", "content": parts}]) == "[a][b][c][d](image);"
    assert render(PARTS, [{"role": "user", "content": [{"type": "thinking", "thinking": "e"}]}]) == "(thinking);"
    for template in (PARTS, CHATML):
        with pytest.raises(InvalidParameter, match=r"messages\[0\].content: a part of type 'text' needs a string 'text'"):
            render(template, [{"role": "user", "content": [{"type": "text", "content": "a"}]}])


@pytest.mark.parametrize(
    ("template", "reads"),
    [
        (CHATML, False),
        (PARTS, True),
        ("{% for m in messages %}{% for c in m['content'] %}{{ c['text'] }}{% endfor %}{% endfor %}", True),
        (
            "{% for m in messages %}{% set x = m.content %}{% set y = x %}{% for c in y %}{{ c.type }}{% endfor %}{% endfor %}",
            True,
        ),
        ("{% macro show(content) %}{% for c in content %}{{ c.text }}{% endfor %}{% endmacro %}", True),
        ("{% for c in messages[0].content | selectattr('type', 'equalto', 'text') %}{{ c }}{% endfor %}", True),
        ("{% for word in messages[0].content.split(' ') %}{{ word }}{% endfor %}", False),
        ("{% set calls = messages[0].content %}{% for call in calls %}{{ call.function }}{% endfor %}", False),
        ("{% for tool in tools %}{{ tool.type }}{{ tool.content }}{% endfor %}", False),
    ],
)
def test_what_a_template_reads_is_seen_in_its_syntax(template: str, reads: bool) -> None:
    assert compile_template(template).reads_parts is reads


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ("Hello", "must be a list"),
        ({"role": "user"}, "must be a list"),
        ([], "must not be empty"),
        (["Hello"], r"messages\[0\] must be a dict"),
        ([{"content": "x"}], r"messages\[0\] needs a 'role'"),
        ([*HELLO, {"role": "user", "content": 3}], r"messages\[1\].content must be a string or a list"),
        ([{"role": "user", "content": [{"text": "x"}]}], r"content\[0\] must be a string or a part"),
        ([{"role": "user", "content": [{"type": "text"}]}], "needs a string 'text'"),
    ],
)
def test_bad_messages_are_explained(messages: Any, why: str) -> None:
    with pytest.raises(InvalidParameter, match=why):
        render(CHATML, messages)


def test_tool_arguments_are_parsed_for_the_template() -> None:
    def call(arguments: Any) -> list[dict[str, Any]]:
        return [{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}]

    template = "{{ messages[0].tool_calls[0].function.arguments | tojson }}"
    assert render(template, call('{"city": "Köln"}')) == render(template, call({"city": "Köln"})) == '{"city": "Köln"}'
    assert render(template, call("")) == "{}"
    with pytest.raises(InvalidParameter, match="not valid JSON"):
        render(template, call("{"))


def test_a_template_may_be_given_as_a_file(tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text(CHATML)
    assert read_template(str(file)) == read_template(CHATML) == CHATML


def test_a_model_without_a_template_says_what_can_be_given():
    with pytest.raises(RequestError, match=r"no chat template.* plain prompt .*chat_template= .*--chat-template FILE"):
        ChatTemplates({}).choose(None, tools=False)
