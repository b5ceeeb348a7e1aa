"""Argument values in the types of the tool's schema, and marks that models forget, repeat or invent."""

import json

import pytest

from parse_samples import M3, Folded
from quire.text.parse.events import ToolEnd
from quire.text.parse.format import combine
from quire.text.parse.machine import AnswerParser
from quire.text.parse.registry import find_format

SCHEMA = {
    "properties": {
        "s": {"type": "string"},
        "z": {"type": ["string", "null"]},
        "n": {"type": "integer"},
        "x": {"type": "number"},
        "b": {"type": "boolean"},
        "l": {"type": "array"},
        "o": {"type": "object"},
        "any": {},
    }
}
TOOLS = {"f": SCHEMA, "g": SCHEMA}


def read(tool, answer, reasoning=None, inside=None):
    """The whole text at once, character by character, and in every pair of pieces: the same."""
    form = combine(find_format(tool, "tool calls"), find_format(reasoning, "reasoning") if reasoning else None)

    def parsed(*cuts):
        machine, events, begin = AnswerParser(form, tools=TOOLS, inside=inside), [], 0
        for cut in (*cuts, len(answer)):
            events += machine.feed(answer[begin:cut])
            begin = cut
        return events + machine.finish()

    whole = parsed()
    told = Folded.of(whole)
    for cuts in (range(len(answer)), *((cut,) for cut in range(len(answer)))):
        assert Folded.of(parsed(*cuts)) == told, cuts
    complete = [event.complete for event in whole if isinstance(event, ToolEnd)]
    calls = [(name, json.loads(text) if done else text) for (name, text), done in zip(told.calls, complete, strict=True)]
    return told.text, told.reasoning, calls


def arguments(tool, answer):
    text, _, [(name, found)] = read(tool, answer)
    assert (text, name) == ("", "f")
    return found


def dsml(wrapper, *parameters, invoke="</｜DSML｜invoke>\n", end=True):
    inner = "".join(parameters)
    body = f'<｜DSML｜{wrapper}>\n<｜DSML｜invoke name="f">\n{inner}{invoke}'
    return body + (f"</｜DSML｜{wrapper}>" if end else "")


def parameter(key, value, string, end="</｜DSML｜parameter>\n"):
    return f'<｜DSML｜parameter name="{key}" string="{"true" if string else "false"}">{value}{end}'


DSML = [("deepseek_v32", "function_calls"), ("deepseek_v4", "tool_calls")]


@pytest.mark.parametrize("tool, wrapper", DSML)
def test_deepseek_values_have_the_schemas_types(tool, wrapper):
    written = dsml(
        wrapper,
        parameter("n", "07", True),
        parameter("s", "5", False),
        parameter("b", "true", True),
        parameter("o", '{"a": 1}', True),
        parameter("any", "5", True),
        parameter("unknown", "5", False),
        parameter("l", "not a list", False),
    )
    meant = {"n": 7, "s": "5", "b": True, "o": {"a": 1}, "any": "5", "unknown": 5, "l": "not a list"}
    assert arguments(tool, written) == meant


@pytest.mark.parametrize("tool, wrapper", DSML)
@pytest.mark.parametrize("end, closed", [(True, "</｜DSML｜parameter>\n"), (True, ""), (False, "</｜DSML｜parameter>\n")])
def test_deepseek_without_the_end_of_an_invocation(tool, wrapper, end, closed):
    assert arguments(tool, dsml(wrapper, parameter("s", "x", True, closed), invoke="", end=end)) == {"s": "x"}
    two = dsml(wrapper, parameter("n", "1", False, closed), invoke="", end=False)
    two += dsml(wrapper, parameter("n", "2", False), end=end).removeprefix(f"<｜DSML｜{wrapper}>\n")
    assert read(tool, two + " Done.") == ("Done.", "", [("f", {"n": 1}), ("f", {"n": 2})])


@pytest.mark.parametrize(
    "tool, answer",
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": VALUES}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": VALUES, "name": "f"}</tool_call>'),
        ("llama3_json", '{"name": "f", "parameters": VALUES}'),
        ("mistral", "[TOOL_CALLS]f[ARGS]VALUES"),
        ("openai", "<|channel|>commentary to=functions.f<|message|>VALUES<|call|>"),
        ("apertus", '<|tools_prefix|>[{"f": VALUES}]<|tools_suffix|>'),
    ],
)
def test_values_that_must_be_strings_in_json(tool, answer):
    values = '{"s": 5, "z": -1.50, "n": 07, "any": 5, "o": {"s": 5}}'
    assert arguments(tool, answer.replace("VALUES", values)) == {"s": "5", "z": "-1.50", "n": 7, "any": 5, "o": {"s": 5}}
    values = '{ "s" : true , "z": null, "n": 1}'
    assert arguments(tool, answer.replace("VALUES", values)) == {"s": "true", "z": None, "n": 1}
    values = '{"s": {"a": [1]}, "z": "x"}'
    assert arguments(tool, answer.replace("VALUES", values)) == {"s": '{"a": [1]}', "z": "x"}


@pytest.mark.parametrize(
    "tool, answer", [("pythonic", "[f(VALUES)]"), ("lfm2", "<|tool_call_start|>[f(VALUES)]<|tool_call_end|>")]
)
def test_values_that_must_be_strings_in_python(tool, answer):
    values = "s=07030, z=None, n=07, x=1.0, any=5, b=True, l=(1, 2)"
    meant = {"s": "07030", "z": None, "n": 7, "x": 1.0, "any": 5, "b": True, "l": [1, 2]}
    assert arguments(tool, answer.replace("VALUES", values)) == meant
    assert arguments(tool, answer.replace("VALUES", "s=True, z={'a': 1}")) == {"s": "True", "z": '{"a": 1}'}


@pytest.mark.parametrize(
    "tool, answer",
    [
        ("gemma4", "<|tool_call>call:f{VALUES}<tool_call|>"),
        ("functiongemma", "<start_function_call>call:f{VALUES}<end_function_call>"),
    ],
)
def test_values_that_must_be_strings_between_marks(tool, answer):
    mark = '<|"|>' if tool == "gemma4" else "<escape>"
    values = f"s:5,z:null,n:07,any:5,x:{mark}2.5{mark}"
    assert arguments(tool, answer.replace("VALUES", values)) == {"s": "5", "z": None, "n": 7, "any": 5, "x": 2.5}


@pytest.mark.parametrize("tool", ["qwen3_coder", "glm45"])
@pytest.mark.parametrize("written, meant", [("07", 7), ("7.0", 7), ("-07", -7), ("+7", 7), ("0", 0), ("7.5", 7.5), ("x", "x")])
def test_integers_between_marks(tool, written, meant):
    answer = (
        f"<tool_call>\n<function=f>\n<parameter=n>\n{written}\n</parameter>\n</function>\n</tool_call>"
        if tool == "qwen3_coder"
        else f"<tool_call>f<arg_key>n</arg_key><arg_value>{written}</arg_value></tool_call>"
    )
    found = arguments(tool, answer)["n"]
    assert found == meant and type(found) is type(meant)


@pytest.mark.parametrize(
    "written, meant",
    [
        ("l={'urgent', 'bug'}", {"l": ["urgent", "bug"]}),
        ("l={1}, o={}", {"l": [1], "o": {}}),
        ("o={'a': {2, 3}, 'b': {1: 'x'}}", {"o": {"a": [2, 3], "b": {"1": "x"}}}),
        ("s='sed -n '360,450p' /a/b.py'", {"s": "sed -n '360,450p' /a/b.py"}),
        ("s='it's', n=1", {"s": "it's", "n": 1}),
        ('s="say "hi", then go", n=1', {"s": 'say "hi", then go', "n": 1}),
        ("l=['it's', 'b'], o={'k's': 'v's'}", {"l": ["it's", "b"], "o": {"k's": "v's"}}),
        ("s='python -c \"print(latex(x, sep='\\,'))\"'", {"s": "python -c \"print(latex(x, sep='\\,'))\""}),
        ("s='a\nb', z='grep \"]\" x'", {"s": "a\nb", "z": 'grep "]" x'}),
        ("s='', z='x'", {"s": "", "z": "x"}),
    ],
)
@pytest.mark.parametrize("tool", ["lfm2", "pythonic", "olmo3"])
def test_sets_and_quotes_in_quotes(tool, written, meant):
    answer = {
        "lfm2": "<|tool_call_start|>[f(VALUES)]<|tool_call_end|>",
        "pythonic": "[f(VALUES)]",
        "olmo3": "<function_calls>\nf(VALUES)\n</function_calls>",
    }[tool]
    assert arguments(tool, answer.replace("VALUES", written)) == meant
    both = answer.replace("f(VALUES)", f"f({written}), g(n=1)" if tool != "olmo3" else f"f({written})\ng(n=1)")
    assert read(tool, both) == ("", "", [("f", meant), ("g", {"n": 1})])


def test_braces_that_nest_without_end_are_text():
    for braces in ("{" * 5000, "{(" * 5000, "[{" * 5000):
        assert read_once("lfm2", f"<|tool_call_start|>[f(l={braces}") == []


def read_once(tool, answer):
    machine = AnswerParser(find_format(tool, "tool calls"), tools=TOOLS)
    events = machine.feed(answer) + machine.finish()
    return [event for event in events if isinstance(event, ToolEnd) and event.complete]


STEP3 = '<steptml:invoke name="f"><steptml:parameter name="s">x</steptml:parameter></steptml:invoke>'


@pytest.mark.parametrize("prefix", ["", "function<｜tool_sep｜>", "function<｜tool_sep｜>f\n", "function", "<｜tool_sep｜>"])
@pytest.mark.parametrize("between", ["", "<｜tool_sep｜>", "\n"])
def test_step3_without_its_prefix(prefix, between):
    call = f"<｜tool_call_begin｜>{prefix}{STEP3}<｜tool_call_end｜>"
    found = [("f", {"s": "x"})]
    assert read("step3", f"Look.<｜tool_calls_begin｜>{call}<｜tool_calls_end｜>") == ("Look.", "", found)
    assert read("step3", f"<｜tool_calls_begin｜>{call}{between}{call}<｜tool_calls_end｜>ok") == ("ok", "", found * 2)
    assert read("step3", call) == ("", "", found)


def kimi(name="f"):
    return f'<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{{"n": 1}}<|tool_call_end|>'


@pytest.mark.parametrize(
    "answer, text",
    [
        ("<|tool_calls_section_begin|>I look. CALL<|tool_calls_section_end|>", ""),
        ("<|tool_calls_section_begin|>CALL and CALL<|tool_calls_section_end|> Done.", "Done."),
        ("Hm.<|tool_calls_section_begin|>CALL that is all<|tool_calls_section_end|>", "Hm."),
        ("<|tool_calls_section_begin|>CALL and no end", "and no end"),
        ("CALL", ""),
        ("CALL<|tool_calls_section_end|>", ""),
    ],
)
def test_kimi_sections_with_noise(answer, text):
    told, _, calls = read("kimi_k2", answer.replace("CALL", kimi()), "kimi_k2")
    assert (told, calls) == (text, [("f", {"n": 1})] * answer.count("CALL"))


@pytest.mark.parametrize(
    "types, written, meant",
    [
        (["integer", "string"], "5", 5),
        (["string", "integer"], "five", "five"),
        (["string", "boolean"], "true", True),
        (["string", "object"], '{"a": 1}', {"a": 1}),
        (["string", "number"], '{"a": 1}', '{"a": 1}'),
        (["string", "array"], "[draft] x", "[draft] x"),
        ("boolean", "1", True),
        ("boolean", "0", False),
        ("boolean", "TRUE", True),
        ("boolean", "yes", "yes"),
        (["boolean", "integer"], "1", 1),
        ("int", "5", 5),
        ("str", "5", "5"),
        ("number", "5", 5),
        (["string", "null"], "null", None),
    ],
)
def test_values_of_one_of_several_types(types, written, meant):
    tools = {"f": {"properties": {"a": {"type": types}}}}
    machine = AnswerParser(find_format("glm45", "tool calls"), tools=tools)
    answer = f"<tool_call>f<arg_key>a</arg_key><arg_value>{written}</arg_value></tool_call>"
    found = json.loads(Folded.of(machine.feed(answer) + machine.finish()).calls[0][1])["a"]
    assert found == meant and type(found) is type(meant)


def test_marks_with_a_suffix():
    form = find_format("hy_v3", "tool calls", ":x1")
    answer = (
        "<think:x1>a</think:x1><tool_calls:x1><tool_call:x1>f<tool_sep:x1><arg_key:x1>n</arg_key:x1>"
        "<arg_value:x1>1</arg_value:x1></tool_call:x1></tool_calls:x1>"
    )
    machine = AnswerParser(form, tools=TOOLS)
    told = Folded.of(machine.feed(answer) + machine.finish())
    assert told == Folded("", "a", [["f", '{"n": 1}']], 1)


def test_a_section_with_nothing_but_noise_is_text():
    for noise in ("oops", "x" * 3000):
        answer = f"<|tool_calls_section_begin|>{noise}<|tool_calls_section_end|>"
        machine = AnswerParser(find_format("kimi_k2", "tool calls"), tools=TOOLS)
        assert Folded.of(machine.feed(answer) + machine.finish()) == Folded(answer)


@pytest.mark.parametrize(
    "reasoning, inside, answer, text, thought",
    [
        ("qwen3", None, "<think>a</think>b</think>c", "b\nc", "a"),
        ("qwen3", None, "</think>\n\nHello", "Hello", ""),
        ("qwen3", False, "Hello</think>", "Hello", ""),
        ("qwen3", True, "a</think></think>b", "b", "a"),
        ("deepseek_r1", None, "a</think>b\n</think>\nc", "b\nc", "a"),
        ("qwen3", None, "write <think> and </think> here", "write <think> and </think> here", ""),
        ("gemma4", None, "<channel|>Hello", "Hello", ""),
        ("gemma4", None, "<|channel>thought\na<channel|>b<channel|>c", "b\nc", "a"),
        ("gemma4", None, "<|channel>thought\na<channel|>b<|channel>thought\nc<channel|>d", "b\nd", "a\nc"),
        ("mistral", None, "[THINK]a[/THINK]b[/THINK]", "b", "a"),
        ("granite", None, "Well. Here is my response: no", "Well. Here is my response: no", ""),
    ],
)
def test_an_end_of_reasoning_that_ends_nothing(reasoning, inside, answer, text, thought):
    assert read("hermes", answer, reasoning, inside) == (text, thought, [])


@pytest.mark.parametrize(
    "answer, text",
    [
        ("foo <co>bar</co: 0:[1,2],1:[3,4]> baz", "foo bar baz"),
        ("<|START_RESPONSE|><co>A</co: 0:[0]>, <co>B</co: 1:[0]>.<|END_RESPONSE|>", "A, B."),
        ("<co: 0>x</co: 0> y", "x y"),
        ("<code>x</code> <co", "<code>x</code> <co"),
        ("a </co: " + "y" * 200, "a </co: " + "y" * 200),
    ],
)
def test_citations_are_left_out(answer, text):
    assert read("cohere_command3", answer, "cohere_command3")[0] == text
    thought = f"<|START_THINKING|>{answer.replace('<|START_RESPONSE|>', '').replace('<|END_RESPONSE|>', '')}<|END_THINKING|>ok"
    assert read("cohere_command3", thought, "cohere_command3")[:2] == ("ok", text)


def test_reasoning_that_stays_in_the_text():
    told = read("minimax_m2", "a\n</think>\n\nb", "minimax_m2_append_think")
    assert told == ("<think>a\n</think>\n\nb", "", [])
    call = '<minimax:tool_call><invoke name="f"><parameter name="n">1</parameter></invoke></minimax:tool_call>'
    assert read("minimax_m2", f"a</think>{call}", "minimax_m2_append_think") == ("<think>a</think>", "", [("f", {"n": 1})])


def test_elements_in_elements():
    schema = {
        "properties": {
            "id": {"type": "integer"},
            "note": {"type": "string"},
            "ship": {"type": "object", "properties": {"city": {"type": "string"}, "zip": {"type": "integer"}}},
            "items": {"type": "array", "items": {"type": "object", "properties": {"sku": {"type": "string"}}}},
            "meta": {"type": "object", "additionalProperties": {"type": "string"}},
            "none": {"type": "array"},
        }
    }
    text = (
        '<tool_call>\n<invoke name="f"><id>42</id><note>At 5.</note><ship><city>Oslo</city><zip>018956</zip></ship>'
        "<items><item><sku>7</sku></item><item><sku>b</sku></item></items><meta><a>1</a></meta><none></none>"
        "<tag>a</tag><tag>b</tag><free><item>1</item><item>x</item></free></invoke>\n</tool_call>"
    )
    answer = "I order.\n" + text.replace("<", f"{M3}<")
    machine = AnswerParser(find_format("minimax_m3", "tool calls"), tools={"f": schema})
    told = Folded.of(machine.feed(answer) + machine.finish())
    assert told.text == "I order." and json.loads(told.calls[0][1]) == {
        "id": 42,
        "note": "At 5.",
        "ship": {"city": "Oslo", "zip": 18956},
        "items": [{"sku": "7"}, {"sku": "b"}],
        "meta": {"a": "1"},
        "none": [],
        "tag": ["a", "b"],
        "free": [1, "x"],
    }
    for bad in ("<a>1</b>", "<a>1", "</a>", "words", "<a>" * 300):
        broken = f'<tool_call><invoke name="f">{bad}</invoke></tool_call>'.replace("<", f"{M3}<")
        assert read_once("minimax_m3", broken) == []


@pytest.mark.parametrize(
    "tool, answer, calls",
    [
        (
            "minicpm5",
            '<function name="f"><param name="s"><![CDATA[a < b</param>]]></param></function>',
            [{"s": "a < b</param>"}],
        ),
        ("minicpm5", '<function name="f"><param name="n">1<param name="s">x</function>', [{"n": 1, "s": "x"}]),
        ("hy_v3", "<tool_calls><tool_call>f<tool_sep></tool_call></tool_calls>", [{}]),
        ("poolside_v1", "<tool_call>f</tool_call>", [{}]),
        ("apertus", '<|tools_prefix|>[{"f": {}}, {"f": {"n": 1}}]', [{}, {"n": 1}]),
        ("gigachat3", 'function call<|role_sep|>\n{"name": "f", "arguments": {"n": 1}}', [{"n": 1}]),
        ("inkling", 'f<|content_invoke_tool_json|>{"name":"f","args":{"n":1}}<|end_message|>', [{"n": 1}]),
        ("inkling", '<|content_invoke_tool_json|>{"name":"f"}<|end_message|>', [{}]),
        ("solar_open2", "<|tool_call:start|>f\n<|tool_arg:start|>n<|tool_arg:value|>1<|tool_call:end|>", [{"n": 1}]),
        (
            "kimi_k3",
            '<|open|>tools<|sep|><|open|>call index="1" tool="f"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>',
            [{}],
        ),
        (
            "muse_glimmer",
            ' to=f.f<|message|><atem:function_calls><atem:invoke name="f.f"></atem:invoke></atem:function_calls><|eom|>',
            [{}],
        ),
    ],
)
def test_details_of_formats(tool, answer, calls):
    assert read(tool, answer) == ("", "", [("f", call) for call in calls])


def test_calls_that_muse_glimmer_only_mentions_are_text():
    call = '<atem:function_calls><atem:invoke name="f"></atem:invoke></atem:function_calls>'
    answer = f" to=self<|message|>I could {call}<|eom|><|start|>assistant to=user<|message|>See {call}<|eot|>"
    assert read("muse_glimmer", answer) == (f"See {call}", f"I could {call}", [])
