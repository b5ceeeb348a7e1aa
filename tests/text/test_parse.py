"""The parser machine: whatever the pieces an answer comes in, its events together are what was written."""

import json
import string

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from parse_samples import FAMILIES, Folded
from quire.text.parse.events import Text, ToolArguments, ToolEnd, ToolStart
from quire.text.parse.format import Calls, Format, combine
from quire.text.parse.formats import BUILT_IN, REQUIRED, named
from quire.text.parse.machine import AnswerParser
from quire.text.parse.registry import detect, find_format, load_plugins, names, register_format
from quire.types.errors import ConfigError

SCHEMA = {"properties": {"s": {"type": "string"}, "n": {"type": "integer"}, "o": {"type": "object"}, "l": {"type": "array"}}}
TOOLS = {"get_weather": SCHEMA, "list-files": SCHEMA, "math.add": SCHEMA}

TEXT_FORMATS = (
    "qwen3_coder", "seed_oss", "minimax_m2", "glm45", "deepseek_v32", "deepseek_v4", "step3", "mimo", "gemma4", "functiongemma",
    "hy_v3", "ling3", "poolside_v1", "kimi_k3", "solar_open2", "minicpm5", "dots", "muse_glimmer", "minimax_m3",
)  # fmt: skip

# neither marks nor the space beside them
_PROSE = st.text(st.characters(exclude_categories=("Cs", "Cc"), exclude_characters="<[{|`"), max_size=30).map(str.strip)
_PLAIN = st.text(string.ascii_letters + " _-.,:é漢🙂\"\\'\n\t{}[]<>|/", max_size=20)
_LEAF = st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(allow_nan=False, allow_infinity=False) | _PLAIN
_NESTED = st.recursive(
    _LEAF,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('aü"\\ ', max_size=3), inner, max_size=3),
    max_leaves=6,
)
_ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "s": _PLAIN,
        "n": st.integers(-(10**6), 10**6),
        "o": st.dictionaries(st.sampled_from(["a", "ü", 'q"']), _NESTED, max_size=3),
        "l": st.lists(_NESTED, max_size=3),
    },
)
_CALLS = st.lists(st.tuples(st.sampled_from(sorted(TOOLS)), _ARGUMENTS), max_size=3)


def parser(tool, reasoning=None, **options):
    form = combine(BUILT_IN[tool] if tool else None, BUILT_IN[reasoning] if reasoning else None)
    return AnswerParser(form, **{"tools": TOOLS} | options)


def events(machine, text, cuts=()):
    out, begin = [], 0
    for cut in [*sorted(cuts), len(text)]:
        out += machine.feed(text[begin:cut])
        begin = cut
    return out + machine.finish()


def _harmless(family, calls):
    """Text formats cannot hold their own end mark, and lose a line end at a value's edge; marks cannot be in keys."""
    if family == "minimax_m3":  # what is inside of containers has no types
        return "</" not in repr(calls) and not any(args.get("o") or args.get("l") for _, args in calls)
    if family in ("gemma4", "functiongemma"):
        return not any("o" in args and args["o"] for _, args in calls) and ":" not in repr(calls).replace("': ", "")
    if FAMILIES[family][0] not in TEXT_FORMATS:
        return True
    return "</" not in repr(calls)


@pytest.mark.parametrize("family", sorted(FAMILIES))
@settings(max_examples=12, deadline=None)
@given(reasoning=_PROSE, text=_PROSE, calls=_CALLS, data=st.data())
def test_pieces_do_not_matter_and_nothing_is_lost(family, reasoning, text, calls, data):
    tool, thinking, write, together = FAMILIES[family]
    if family.endswith("pythonic") or family in ("lfm2", "olmo3"):
        calls = [(name.replace("-", "_"), args) for name, args in calls]
    assume(_harmless(family, calls))
    tools = {**TOOLS, "list_files": SCHEMA}
    if not together and calls:
        text = ""
    answer = write(reasoning, text, calls)
    whole = events(parser(tool, thinking, tools=tools), answer)
    cuts = data.draw(st.sets(st.integers(0, len(answer)), max_size=12))
    assert Folded.of(events(parser(tool, thinking, tools=tools), answer, cuts)) == Folded.of(whole)
    assert Folded.of(events(parser(tool, thinking, tools=tools), answer, range(len(answer)))) == Folded.of(whole)
    told = Folded.of(whole)
    assert (told.text, told.reasoning) == (text, reasoning)
    assert [(name, json.loads(arguments)) for name, arguments in told.calls] == calls
    assert told.ends == len(calls)


@pytest.mark.parametrize("family", sorted(FAMILIES))
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_any_text_at_all(family, data):
    """Marks in any disorder: the pieces do not matter, nothing fails, calls are told in order, complete ones are JSON."""
    tool, thinking, *_ = FAMILIES[family]
    form = combine(BUILT_IN[tool], BUILT_IN[thinking])
    word = st.sampled_from(
        [*sorted(form.marks), "get_weather", '{"name": "get_weather", "arguments": {', "}}", '{"a": 1}', " ", "\n", "x", "}"]
    )
    answer = "".join(data.draw(st.lists(word, max_size=14)))
    whole = events(parser(tool, thinking), answer)
    told = Folded.of(whole)
    assert Folded.of(events(parser(tool, thinking), answer, range(len(answer)))) == told
    for end in whole:
        if isinstance(end, ToolEnd) and end.complete:
            json.loads(told.calls[end.index][1])


@pytest.mark.parametrize("calls", [[], [("get_weather", {"s": "é", "l": [1, {"x": None}]}), ("math.add", {})]])
def test_required_and_named(calls):
    from parse_samples import dumps, required

    form = Format((REQUIRED,), BUILT_IN["qwen3"].thinking)
    told = Folded.of(events(AnswerParser(form, tools=TOOLS), "<think>hm</think>\n" + required(calls), range(20)))
    assert [(name, json.loads(arguments)) for name, arguments in told.calls] == calls and told.reasoning == "hm"
    for name, arguments in calls:
        told = Folded.of(events(AnswerParser(Format((named(name),)), tools=TOOLS), dumps(arguments)))
        assert told.calls == [[name, dumps(arguments)]] and told.text == ""


@pytest.mark.parametrize(
    "tool, answer",
    [
        ("hermes", "see <tool_call> and </tool_call> in the docs"),
        ("hermes", '<tool_call>{"no": "name"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "two words", "arguments": {}}</tool_call>'),
        ("hermes", "half a marker <tool_"),
        ("llama3_json", '{"name": "Bob", "parameters": {}}'),
        ("llama3_json", '{"city": "Paris"} is an object'),
        ("pythonic", "[1, 2, 3] is a list"),
        ("pythonic", "[unknown(a=1)]"),
        ("pythonic", "[get_weather('positional')]"),
        ("mistral", "[TOOL_CALLS] nothing at all"),
        ("kimi_k2", "<|tool_calls_section_begin|>oops<|tool_calls_section_end|>"),
        ("glm45", "<tool_call>" + "x" * 300),
        ("openai", "no channels at all"),
    ],
)
def test_what_is_no_call_is_text(tool, answer):
    for cuts in ((), range(len(answer))):
        assert Folded.of(events(parser(tool), answer, cuts)) == Folded(text=answer)


def test_a_call_that_goes_wrong_is_broken_off():
    answer = 'Hm. <tool_call>{"name": "get_weather", "arguments": {"s": "x", oops}}</tool_call> And on.'
    told = events(parser("hermes"), answer)
    assert ToolEnd(0, complete=False) in told
    folded = Folded.of(told)
    assert folded.calls == [["get_weather", '{"s": "x", ']] and folded.text == "Hm.\noops}}\nAnd on."


def test_a_call_that_is_cut_off():
    told = events(parser("hermes"), '<tool_call>{"name": "get_weather", "arguments": {"s": "Par')
    assert told == [ToolStart(0, "get_weather"), ToolArguments(0, '{"s": "Par'), ToolEnd(0, complete=False)]


def test_what_has_one_meaning_is_put_right():
    answer = '<tool_call>{"name": "get_weather", "arguments": {"s": "a\nb\\d\\\'", "n": True, "l": [1, ], }}</tool_call>'
    [[_, arguments]] = Folded.of(events(parser("hermes"), answer, range(len(answer)))).calls
    assert json.loads(arguments) == {"s": "a\nb\\d'", "n": True, "l": [1]}


def test_arguments_as_a_string_or_none():
    for written, meant in (('"{\\"s\\": \\"x\\"}"', {"s": "x"}), ("null", {}), ('""', {})):
        answer = f'<tool_call>{{"name": "get_weather", "arguments": {written}}}</tool_call>'
        [[_, arguments]] = Folded.of(events(parser("hermes"), answer)).calls
        assert json.loads(arguments) == meant
    for written in ('"text"', "[1]", "7", "true", '"[1]"', '"{} {}"'):
        answer = f'<tool_call>{{"name": "get_weather", "arguments": {written}}}</tool_call>'
        assert Folded.of(events(parser("hermes"), answer, range(len(answer)))) == Folded(answer), "no object, no call"


def test_text_streams_as_it_comes():
    machine = parser("hermes", "qwen3")
    assert machine.feed("The ") == [Text("The")]
    assert machine.feed("sky") == [Text(" sky")]
    assert machine.feed(" <") == []
    assert machine.feed("b>") == [Text(" <b>")]


def test_space_is_not_held_back_for_ever():
    machine, answer = parser("hermes", "qwen3"), "a" + " " * 1000 + "<tool_call>" + " " * 1000
    assert sum(len(event.text) for event in machine.feed("a" + " " * 1000)) > 700
    whole = Folded.of(events(parser("hermes", "qwen3"), answer))
    assert Folded.of(events(parser("hermes", "qwen3"), answer, range(len(answer)))) == whole == Folded(answer)
    answer = "b" + " " * 1000 + '<tool_call>{"name": "get_weather"}</tool_call>'
    whole = Folded.of(events(parser("hermes", "qwen3"), answer))
    assert Folded.of(events(parser("hermes", "qwen3"), answer, range(len(answer)))) == whole and whole.calls


def test_arguments_stream_as_they_come():
    machine = parser("hermes")
    machine.feed('<tool_call>{"name": "get_weather", "arguments": ')
    assert machine.feed('{"s": "Pa') == [ToolStart(0, "get_weather"), ToolArguments(0, '{"s": "Pa')]
    assert machine.feed("ris, ") == [ToolArguments(0, "ris, ")]


def test_types_come_from_the_schema():
    schema = {
        "properties": {"a": {"type": ["string", "null"]}, "b": {"enum": ["1", "2"]}, "c": {"anyOf": [{"type": "number"}]}}
    }
    answer = "".join(
        f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>"
        for key, value in [("a", "null"), ("b", "1"), ("c", "1.5"), ("d", "[1, 2"), ("e", "{'x': True}")]
    )
    told = Folded.of(events(parser("glm45", tools={"f": schema}), f"<tool_call>f{answer}</tool_call>"))
    assert json.loads(told.calls[0][1]) == {"a": None, "b": "1", "c": 1.5, "d": "[1, 2", "e": {"x": True}}


def test_thinking_that_the_prompt_opened_or_closed():
    assert Folded.of(events(parser("hermes", "qwen3", inside=True), "so </think> yes")) == Folded("yes", "so")
    assert Folded.of(events(parser("hermes", "deepseek_r1"), "<think>so</think>yes")) == Folded("yes", "so")
    assert Folded.of(events(parser("hermes", "deepseek_r1", inside=False), "yes")) == Folded("yes")
    assert Folded.of(events(parser("hermes", "qwen3"), "use <think> and </think> so")) == Folded("use <think> and </think> so")
    assert Folded.of(events(parser("hermes", "qwen3", inside=True), "never ends")) == Folded("", "never ends")


def test_special_tokens_that_are_left_over_vanish():
    machine = parser("mistral", noise=frozenset({"</s>", "[INST]"}))
    assert Folded.of(events(machine, "a [INST]b</s> c</s>", range(19))) == Folded("a b c")


def test_calls_are_text_when_there_are_no_tools():
    answer = '<tool_call>{"name": "get_weather", "arguments": {}}</tool_call>'
    assert Folded.of(events(parser("hermes", tools=None), answer)) == Folded(answer)


TEMPLATES = {
    "hermes": '{%- for t in tools %}<tools>..</tools> {\\"name\\": <n>, \\"arguments\\": <a>}</tool_call><tool_call>',
    "qwen3_coder": "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>",
    "glm45": "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>",
    "mistral": "{{ '[TOOL_CALLS]' }}",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + '\\n' + '```json'",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'+ tool['function']['name'] + '<｜tool▁sep｜>'",
    "kimi_k2": "<|tool_calls_section_begin|>",
    "openai": "<|start|>assistant<|channel|>analysis<|message|>",
    "llama3_json": 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.',
    "deepseek_v32": "<｜DSML｜function_calls>\\n<｜DSML｜invoke name=",
    "step3": "<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name=",
    "gemma4": "<|tool_call>call:' + function['name'] + '{",
    "functiongemma": "<start_function_call>call:",
    "lfm2": "List of tools: <|tool_list_start|>[ <|tool_call_start|>[",
    "olmo3": "<functions>{{ tools }}</functions> <function_calls>",
    "cohere_command": '<|START_ACTION|>[ {"tool_call_id": "0", "tool_name":',
    "jamba": "<tool_calls>[",
    "hunyuan_a13b": "<tool_calls>[ </tool_calls> <answer>",
    "ernie45": '<tool_call>{"name": ..., "arguments": ...} <response>',
    "internlm": "<|action_start|><|plugin|>",
    None: "{{ messages }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_auto_reads_the_template(name):
    assert detect(TEMPLATES[name], "tool calls") == name
    assert detect({"default": "x", "tool_use": TEMPLATES[name]}, "tool calls") == name


def test_auto_finds_reasoning():
    assert detect("{{ '<think>' }}..</think>", "reasoning") == "qwen3"
    assert detect("<|channel|>analysis<|message|>", "reasoning") == "openai"
    assert detect("[TOOL_CALLS] [THINK][/THINK]", "reasoning") == "mistral"
    assert detect("<arg_key></think>", "reasoning") == "glm45"
    assert detect("plain", "reasoning") is None


def test_names_that_are_not_known():
    with pytest.raises(ConfigError, match="did you mean 'hermes'"):
        find_format("hermis", "tool calls")
    with pytest.raises(ConfigError, match="no parser 'hermes' for reasoning"):
        find_format("hermes", "reasoning")


# as vLLM registers them
VLLM_TOOLS = """
apertus cohere_command3 cohere_command4 deepseek_v3 deepseek_v31 deepseek_v32 deepseek_v4 dots ernie45 functiongemma gemma4
gigachat3 glm45 glm47 granite granite-20b-fc granite4 hermes hunyuan_a13b hy_v3 inkling internlm jamba kimi_k2 kimi_k3 lfm2
ling3 llama3_json llama4_json llama4_pythonic longcat mimo minicpm5 minimax minimax_m2 minimax_m3 mistral muse_glimmer olmo3
openai phi4_mini_json poolside_v1 pythonic qwen3_coder qwen3_xml seed_oss solar_open2 step3 step3p5 xlam
"""
VLLM_REASONING = """
cohere_command3 cohere_command4 deepseek_r1 deepseek_v3 deepseek_v4 ernie45 gemma4 glm45 glm47 granite holo2 hunyuan_a13b hy_v3
inkling kimi_k2 kimi_k3 ling3 mimo minimax_m2 minimax_m2_append_think minimax_m3 mistral muse_glimmer nemotron_v3 olmo3
openai_gptoss poolside_v1 qwen3 seed_oss solar_open2 step3 step3p5
"""


@pytest.mark.parametrize("use, known", [("tool calls", VLLM_TOOLS), ("reasoning", VLLM_REASONING)])
def test_every_name_of_vllms_is_known(use, known):
    assert set(known.split()) <= set(names(use))
    assert all(find_format(name, use) for name in known.split())


def test_plugins_of_packages(monkeypatch, caplog):
    class Point:
        group, value, dist = "quire.parsers", "module:thing", None

        def __init__(self, name, found):
            self.name, self.load = name, lambda: found

    points = [Point("packed", Format((named("f"),))), Point("maker", lambda: register_format("made", Format((named("g"),))))]
    monkeypatch.setattr("quire.config.plugins._entry_points", lambda group: points if group == "quire.parsers" else [])
    load_plugins([])
    assert {"packed", "made"} <= set(names("tool calls"))
    points.append(Point("broken", lambda: 1 / 0))
    load_plugins([])
    assert "'broken'" in caplog.text
    with pytest.raises(ConfigError, match=r"'broken'.*ZeroDivisionError"):
        load_plugins([], require=True)


def test_a_plugin_file(tmp_path):
    plugin = tmp_path / "mine.py"
    plugin.write_text(
        "from quire.text.parse.format import Calls, Format\n"
        "from quire.text.parse.parts import Json, Name\n"
        "from quire.text.parse.registry import register_format\n"
        'register_format("mine", Format((Calls(("CALL ",), (Name((" WITH ",)), Json()), end="DONE"),)))\n'
    )
    load_plugins([str(plugin)])
    assert "mine" in names("tool calls")
    told = Folded.of(events(AnswerParser(find_format("mine", "tool calls"), tools=TOOLS), 'ok CALL f WITH {"a": 1} DONE!'))
    assert told == Folded("ok\n!", "", [["f", '{"a": 1}']], 1)
    for bad in ("nowhere.py", str(tmp_path)):
        with pytest.raises(ConfigError):
            load_plugins([bad])
    with pytest.raises(ConfigError):
        register_format("auto", Format((Calls(("x",), ()),)))


# ---- what models get wrong, and can only mean one thing

CALL = '{"name": "get_weather", "arguments": {"s": "x"}}'
GOOD = ["get_weather", '{"s": "x"}']


def told(tool, answer, reasoning=None, **options):
    whole = Folded.of(events(parser(tool, reasoning, **options), answer))
    assert Folded.of(events(parser(tool, reasoning, **options), answer, range(len(answer)))) == whole
    return whole


def complete(tool, answer, **options):
    return [event.complete for event in events(parser(tool, **options), answer) if isinstance(event, ToolEnd)]


def test_of_arguments_that_are_there_twice_the_first_count():
    twice = '{"name": "get_weather", "arguments": {"s": "x"}, "arguments": {"s": "y"}}'
    for tool, answer in (
        ("hermes", f"<tool_call>{twice}</tool_call>"),
        ("mistral", f"[TOOL_CALLS] [{twice}]"),
        ("llama3_json", twice.replace('"arguments"', '"parameters"', 1)),
        ("jamba", f"<tool_calls>[{twice}]</tool_calls>"),
    ):
        assert told(tool, answer) == Folded(calls=[GOOD], ends=1), tool
        assert complete(tool, answer) == [True]
    first = '<tool_call>{"arguments": {"s": "x"}, "arguments": {"s": "y"}, "name": "get_weather"}</tool_call>'
    assert told("hermes", first) == Folded(calls=[GOOD], ends=1)


def test_arguments_are_an_object_that_anyone_can_parse():
    half = '{"name": "get_weather", "arguments": {"s": "\\ud83d", "l": ["\\udE00", "\\ud83d\\ude00"]}}'
    [[_, arguments]] = told("hermes", f"<tool_call>{half}</tool_call>").calls
    assert json.loads(arguments) == {"s": "\ufffd", "l": ["\ufffd", "😀"]}
    assert complete("hermes", '<tool_call>{"name": "get_weather", "arguments": {"n": 1e999}}</tool_call>') == [False]
    assert told("pythonic", f"[get_weather(n=0x{'f' * 4000})]").text, "a number that nobody writes out"


def test_a_call_in_reasoning_that_never_ends():
    qwen = "<tool_call>\n<function=get_weather>\n<parameter=s>\nx\n</parameter>\n</function>\n</tool_call>"
    glm = "<tool_call>get_weather\n<arg_key>s</arg_key>\n<arg_value>x</arg_value>\n</tool_call>"
    for tool, reasoning, call in (
        ("hermes", "qwen3", f"<tool_call>\n{CALL}\n</tool_call>"),
        ("qwen3_coder", "qwen3", qwen),
        ("glm45", "glm45", glm),
        ("hermes", "deepseek_r1", f"<tool_call>{CALL}</tool_call>"),
    ):
        for answer, inside in ((f"<think>I look. {call}", None), (f"I look. {call}", True)):
            assert told(tool, answer, reasoning, inside=inside) == Folded("", "I look.", [GOOD], 1), tool
        two = told(tool, f"<think>a {call}\n{call} and text", reasoning)
        assert two == Folded("and text", "a", [GOOD, GOOD], 2)
        drafted = told(tool, f"<think>a {call} b</think>no", reasoning)
        assert (drafted.text, drafted.calls) == ("no", []) and drafted.reasoning == f"a {call} b", "it was only thought of"
    mentioned = "<think>I could write <tool_call> now. Or not"
    assert told("hermes", mentioned, "qwen3") == Folded("", mentioned.removeprefix("<think>"))
    machine = parser("hermes", "qwen3")
    machine.feed("<think>hm <tool_call> is")
    assert machine.feed(" a mark and").pop().text == " a mark and", "what is no call does not hold up the stream"


def test_marks_that_are_missing():
    parameter, closed = "<function=get_weather>\n<parameter=s>\nx\n", "</parameter>\n"
    for answer in (
        f"{parameter}{closed}</function>",
        f"{parameter}{closed}</function>\n</tool_call>",
        f"<tool_call>\n{parameter}</function>\n</tool_call>",
        f"<tool_call>\n{parameter}{closed}</tool_call>",
        f"<tool_call>\n{parameter}{closed}",
        f"{parameter}</function>",
    ):
        assert told("qwen3_coder", answer) == Folded(calls=[GOOD], ends=1), answer
        assert complete("qwen3_coder", answer) == [True]
    answer = "<function=get_weather>\n<parameter=s>\nx\n<parameter=n>\n1\n</parameter>\n</function>"
    assert told("qwen3_coder", answer).calls == [["get_weather", '{"s": "x", "n": 1}']]
    assert told("qwen3_coder", '<function=get_weather>{"s": 1}</function>').calls == []
    assert told("hermes", f"<tool_call>{CALL[:-1]}</tool_call>") == Folded(calls=[GOOD], ends=1)
    fenced = '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{"s": "x"}'
    assert told("deepseek_v3", f"{fenced}<｜tool▁call▁end｜><｜tool▁calls▁end｜>Yes") == Folded("Yes", calls=[GOOD], ends=1)


@pytest.mark.parametrize("bad", ['{"nome": 1}', '{"name": "get_weather", "arguments": [1]}'])
def test_one_bad_call_among_several(bad):
    tagged = [f"<tool_call>{one}</tool_call>" for one in (CALL, bad, CALL)]
    assert told("hermes", "".join(tagged)) == Folded(tagged[1], calls=[GOOD, GOOD], ends=2)
    for tool, begin, end in (("mistral", "[TOOL_CALLS] [", "]"), ("jamba", "<tool_calls>[", "]</tool_calls>")):
        assert told(tool, f"{begin}{bad}, {CALL}, {CALL}{end}") == Folded(bad, calls=[GOOD, GOOD], ends=2)
        assert told(tool, f"{begin}{CALL}, {bad}, {CALL}{end} end") == Folded(f"{bad}\nend", calls=[GOOD, GOOD], ends=2)


def test_one_bad_call_among_several_between_marks():
    def kimi(*calls):
        inner = "".join(f"<|tool_call_begin|>{call}<|tool_call_end|>" for call in calls)
        return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"

    good = 'functions.get_weather:0<|tool_call_argument_begin|>{"s": "x"}'
    for bad, text in (("oops", "oops"), ('functions.f:1<|tool_call_argument_begin|>{"a": oops}', "oops}")):
        found = told("kimi_k2", kimi(good, bad, good))
        assert [call for call in found.calls if call[0] != "f"] == [GOOD, GOOD] and text in found.text
        assert "section" not in found.text
    broken = '<tool_call>{"name": "get_weather", "arguments": {"s": oops}}</tool_call>'
    found = told("hermes", f"{broken}<tool_call>{CALL}</tool_call>")
    assert found.calls[1] == GOOD and found.text == "oops}}"
    assert complete("hermes", f"{broken}<tool_call>{CALL}</tool_call>") == [False, True]


def test_json_behind_prose():
    call = CALL.replace("arguments", "parameters")
    assert told("llama3_json", f"Let me see. {call}") == Folded("Let me see.", calls=[GOOD], ends=1)
    assert told("llama3_json", f"One: {call}; {call} Done.") == Folded("One:\nDone.", calls=[GOOD, GOOD], ends=2)
    assert told("xlam", f"I see.\n```json\n[{CALL}]\n```") == Folded("I see.", calls=[GOOD], ends=1)
    prose = 'An object {"name": "Bob"} and {"a": {"name": "get_weather"}}, { or } and {"parameters": 1} too {'
    assert told("llama3_json", prose) == Folded(prose)
    machine = parser("llama3_json")
    machine.feed('See {"other": ')
    assert machine.feed("[1, 2, 3").pop().text == " [1, 2, 3", "objects that are no calls stream as they come"


@pytest.mark.parametrize(
    "written, meant",
    [
        ('{s:<|"|>Zoë, {n:1}<|"|>,n:42}', {"s": "Zoë, {n:1}", "n": 42}),
        (
            '{o:{a:true,b:[1.5,<|"|>x<|"|>,{}],<|"|>c d<|"|>:null},l:[]}',
            {"o": {"a": True, "b": [1.5, "x", {}], "c d": None}, "l": []},
        ),
        ('{n:<|"|>7<|"|>,s:plain words}', {"n": 7, "s": "plain words"}),
        ("{}", {}),
    ],
)
def test_gemma(written, meant):
    [[name, arguments]] = told("gemma4", f"<|tool_call>call:get_weather{written}<tool_call|>").calls
    assert (name, json.loads(arguments)) == ("get_weather", meant)
    escaped = written.replace('<|"|>', "<escape>")
    [[name, arguments]] = told("functiongemma", f"<start_function_call>call:get_weather{escaped}<end_function_call>").calls
    assert (name, json.loads(arguments)) == ("get_weather", meant)


def test_frames_around_an_answer_are_left_out():
    assert told("hunyuan_a13b", "<answer>\nHello\n</answer>", "hunyuan_a13b") == Folded("Hello")
    answer = "<think>\nhm\n</think>\n<answer>\nHello\n</answer>"
    assert told("hunyuan_a13b", answer, "hunyuan_a13b") == Folded("Hello", "hm")
    assert told("ernie45", "hm\n</think>\n\n<response>\nYes\n</response>\n", "ernie45") == Folded("Yes", "hm")
    answer = "<|START_THINKING|>hm<|END_THINKING|><|START_TEXT|>Yes<|END_TEXT|>"
    assert told("cohere_command4", answer, "cohere_command4") == Folded("Yes", "hm")
