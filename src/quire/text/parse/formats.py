"""The formats by the names vLLM gives their parsers. What a model of each family writes is in the comment above its row."""

from collections.abc import Callable

from quire.text.parse.format import Calls, Channels, Format, Thinking
from quire.text.parse.parts import (
    CallPart,
    Elements,
    Envelope,
    Id,
    Json,
    Keyed,
    Known,
    Mark,
    Marked,
    Maybe,
    Name,
    Parameters,
    PythonCall,
    Word,
)

_THINK = Thinking(("<think>",), ("</think>",))
_THINK_UNTIL_CALLS = Thinking(("<think>",), ("</think>",), calls_end_it=True)
_THINKS_AT_ONCE = Thinking(("<think>",), ("</think>",), opened=True)
_ATEM = "atem:"


def _tagged(begin: str, end: str, in_template: tuple[str, ...], frames: tuple[str, ...] = ()) -> Format:
    """One call in JSON between two marks, once per call."""
    return Format((Calls((begin,), (Envelope(),), end=end),), in_template=in_template, frames=frames)


def _list(*begin: str, closing: str, envelope: Envelope = Envelope()) -> Calls:  # noqa: B008 it is frozen
    """Calls in a JSON list."""
    return Calls(begin, (envelope,), opening="[", several=True, between=",", end="]", closing=closing)


# <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>, once per call
_HERMES = _tagged("<tool_call>", "</tool_call>", ("<tool_call>", "arguments"))

# {"name": "f", "parameters": {"a": 1}}; {"name": ...          also after text
_JSON_CALLS = Calls(
    ("{",), (Envelope(strict=True),), several=True, between=";", begin_is_read=False, markerless=True, anywhere=True
)
_LLAMA_JSON = Format(
    (_JSON_CALLS,),
    noise=("<|python_tag|>",),
    in_template=('"parameters": dictionary of argument name',),
)

# [f(a=1), g(b='x')]
_PYTHONIC = Calls(("[",), (PythonCall(),), several=True, between=",", end="]", markerless=True)

# [TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, ...]     and since v11     [TOOL_CALLS]f[CALL_ID]abc[ARGS]{"a": 1}
_MISTRAL = Format(
    (
        Calls(("[TOOL_CALLS]",), (Envelope(),), opening="[", several=True, between=",", end="]"),
        Calls(
            ("[TOOL_CALLS]",),
            (Name((), left=("[CALL_ID]", "[ARGS]", "{")), Id("[CALL_ID]", "[ARGS]"), Maybe("[ARGS]"), Json()),
        ),
    ),
    Thinking(("[THINK]",), ("[/THINK]",), reopen=True),
    short_ids=True,
    in_template=("[TOOL_CALLS]",),
)


def _functions(begin: str, end: str) -> tuple[Calls, ...]:
    """<function=f><parameter=a>1</parameter></function> between two marks, every mark on a line of its own.

    Models forget the marks around it, and the ends of a parameter and of the function.
    """
    parameters = Parameters(
        ("<parameter=", ">"), ("", "</parameter>"), lines=True, stops=("<parameter=", "</function>", end),
        end="</function>", before=(end, "<function="),
    )  # fmt: skip
    function: tuple[CallPart, ...] = (Mark("<function="), Name((">",)), parameters)
    return (
        Calls((begin,), function, several=True, end=end),
        Calls(("<function=",), function, several=True, end=end, begin_is_read=False),
    )


_QWEN_CODER = Format(_functions("<tool_call>", "</tool_call>"), in_template=("<tool_call>", "<function="))
_SEED = Format(
    _functions("<seed:tool_call>", "</seed:tool_call>"),
    Thinking(("<seed:think>",), ("</seed:think>",)),
    in_template=("<seed:tool_call>",),
)


def _invocations(begin: str, end: str, tag: str = "", kinds: tuple[tuple[str, str], ...] = ()) -> Calls:
    """<invoke name="f"><parameter name="a">1</parameter></invoke>, several between two marks; `tag` in front of every name.

    Models forget the ends of a parameter and of an invocation.
    """
    invoke, parameter, over = f'<{tag}invoke name="', f'<{tag}parameter name="', f"</{tag}invoke>"
    parameters = Parameters(
        (parameter, '">'),
        ("", f"</{tag}parameter>"),
        kinds,
        stops=(parameter, over, invoke, end),
        end=over,
        before=(invoke, end),
    )
    return Calls((begin,), (Mark(invoke), Name(('">',), doubled=tag == _ATEM), parameters), several=True, end=end)


_MINIMAX_M2 = Format(
    (_invocations("<minimax:tool_call>", "</minimax:tool_call>"),), _THINK, in_template=("<minimax:tool_call>",)
)


def _dsml(wrapper: str) -> Format:
    """... <parameter name="a" string="false">1</parameter> ..., all with a mark in front of their names."""
    tag = "｜DSML｜"
    begin, kinds = f"<{tag}{wrapper}>", (('" string="true">', "string"), ('" string="false">', "json"))
    return Format((_invocations(begin, f"</{tag}{wrapper}>", tag, kinds),), _THINK, in_template=(begin,))


_DEEPSEEK_BEGIN, _DEEPSEEK_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_DEEPSEEK_CALL, _DEEPSEEK_SEPARATOR, _DEEPSEEK_CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


def _deepseek(*call: CallPart, in_template: tuple[str, ...] = ()) -> Format:
    parts = (Mark(_DEEPSEEK_CALL), *call, Mark(_DEEPSEEK_CALL_END))
    calls = Calls((_DEEPSEEK_BEGIN,), parts, end=_DEEPSEEK_END, several=True)
    return Format((calls,), _THINK, in_template=(_DEEPSEEK_BEGIN, *in_template))


# begin, then per call: call begin, function, separator, f, a line end, and the arguments in a fenced block of json
_DEEPSEEK_V3 = _deepseek(
    Mark("function"), Mark(_DEEPSEEK_SEPARATOR), Name(("\n",)), Mark("```json"), Json(), Mark("```"), in_template=("```json",)
)
# begin, then per call: call begin, f, separator, the arguments
_DEEPSEEK_V31 = _deepseek(Name((_DEEPSEEK_SEPARATOR,)), Json())


# calls begin, then per call: call begin, function, separator, an invocation, call end; calls end. Models forget what stands in
# front of the invocation, write the name there, too, and separate calls.
def _step3(begin: str, begin_is_read: bool) -> Calls:
    end, over, parameter = "<｜tool_calls_end｜>", "</steptml:invoke>", '<steptml:parameter name="'
    stops = (parameter, over, _STEP3_CALL_END, end)
    parameters = Parameters(
        (parameter, '">'), ("", "</steptml:parameter>"), stops=stops, end=over, before=(_STEP3_CALL_END, end)
    )
    call = (
        Mark(_STEP3_CALL), Word(), Maybe("<｜tool_sep｜>"), Word(), Mark('<steptml:invoke name="'), Name(('">',)), parameters,
        Mark(_STEP3_CALL_END), Maybe("<｜tool_sep｜>"),
    )  # fmt: skip
    return Calls((begin,), call, several=True, end=end, begin_is_read=begin_is_read)


_STEP3_CALL, _STEP3_CALL_END = "<｜tool_call_begin｜>", "<｜tool_call_end｜>"
_STEP3 = Format(
    (_step3("<｜tool_calls_begin｜>", True), _step3(_STEP3_CALL, False)),
    _THINKS_AT_ONCE,
    in_template=("<｜tool_calls_begin｜>",),
)

# <|tool_call|>[{"name": "f", "arguments": {"a": 1}}, ...], in later models between <tool_call> and </tool_call>
_GRANITE = Format(
    (
        _list("<|tool_call|>", "<tool_call>", closing="</tool_call>"),
        Calls(("<|tool_call|>", "<tool_call>"), (Envelope(),), end="</tool_call>"),
    ),
    Thinking(
        ("Here is my thought process:", "Here's my thought process:"),
        ("Here is my response:", "Here's my response:"),
        phrases=True,
    ),
    in_template=("<|tool_call|>", "<|start_of_role|>"),
)


# <tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>, mostly every pair on a line of its own
def _pairs(suffix: str = "") -> Parameters:
    key, value = (f"<arg_key{suffix}>", f"</arg_key{suffix}>"), (f"<arg_value{suffix}>", f"</arg_value{suffix}>")
    return Parameters(key, value, before=(f"</tool_call{suffix}>",))


_GLM = Format(
    (Calls(("<tool_call>",), (Name(("\n",), left=("<arg_key>", "</tool_call>")), _pairs()), end="</tool_call>"),),
    _THINK,
    in_template=("<arg_key>",),
)


def hy_v3(suffix: str = "") -> Format:
    """<tool_calls>, then per call: <tool_call>f<tool_sep>, pairs as above, </tool_call>; </tool_calls>.

    `suffix`: what all names of marks end with.
    """
    end = f"</tool_call{suffix}>"
    name = Name((f"<tool_sep{suffix}>",), left=(f"<arg_key{suffix}>", end))
    calls = Calls(
        (f"<tool_calls{suffix}>",),
        (Mark(f"<tool_call{suffix}>"), name, _pairs(suffix), Mark(end)),
        end=f"</tool_calls{suffix}>",
        several=True,
    )
    thinking = Thinking((f"<think{suffix}>",), (f"</think{suffix}>",))
    return Format((calls,), thinking, in_template=("<tool_sep", "<arg_key"))


# section begin, then per call: call begin, functions.f:0, argument begin, the arguments, call end; section end
def _kimi(begin: str, begin_is_read: bool) -> Calls:
    call = (
        Mark("<|tool_call_begin|>"),
        Name(("<|tool_call_argument_begin|>",), written=r"(?:functions\.)?(.+):\d+"),
        Json(),
        Mark("<|tool_call_end|>"),
    )
    return Calls((begin,), call, end="<|tool_calls_section_end|>", several=True, begin_is_read=begin_is_read, noisy=True)


_KIMI = Format(
    (_kimi("<|tool_calls_section_begin|>", True), _kimi("<|tool_call_begin|>", False)),
    _THINK_UNTIL_CALLS,
    in_template=("<|tool_calls_section_begin|>",),
)

# <|open|>tools<|sep|>, then per call: <|open|>call tool="f" index="1"<|sep|>, arguments, <|close|>call<|sep|>; then the same
# with close. An argument: <|open|>argument key="a" type="number"<|sep|>1<|close|>argument<|sep|>
_KIMI_K3_TYPES = ("number", "integer", "boolean", "null", "object", "array")
_KIMI_K3 = Format(
    (
        Calls(
            ("<|open|>tools<|sep|>",),
            (
                Mark("<|open|>call"),
                Name(("<|sep|>",), written=r'(?:.*\s)?tool="([^"]*)".*'),
                Parameters(
                    ('<|open|>argument key="', '"<|sep|>'),
                    ("", "<|close|>argument<|sep|>"),
                    (('" type="string"<|sep|>', "string"), *((f'" type="{one}"<|sep|>', "json") for one in _KIMI_K3_TYPES)),
                    stops=("<|close|>call<|sep|>", "<|close|>tools<|sep|>"),
                    end="<|close|>call<|sep|>",
                    before=("<|open|>call", "<|close|>tools<|sep|>"),
                ),
            ),
            end="<|close|>tools<|sep|>",
            several=True,
        ),
    ),
    Thinking(("<|open|>think<|sep|>",), ("<|close|>think<|sep|>",), calls_end_it=True),
    frames=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
    in_template=("<|open|>", "<|sep|>"),
)

# <|tool_call:start|>f, a line end, then per argument: <|tool_arg:start|>a<|tool_arg:value|>1<|tool_arg:end|>; <|tool_call:end|>
_SOLAR_OPEN2 = Format(
    (
        Calls(
            ("<|tool_call:start|>",),
            (
                Name(("\n",), left=("<|tool_arg:start|>", "<|tool_call:end|>")),
                Parameters(
                    ("<|tool_arg:start|>", "<|tool_arg:value|>"),
                    ("", "<|tool_arg:end|>"),
                    stops=("<|tool_arg:start|>", "<|tool_call:end|>", "<|tool_call:start|>"),
                    before=("<|tool_call:end|>", "<|tool_call:start|>"),
                ),
            ),
            end="<|tool_call:end|>",
        ),
    ),
    Thinking(("<|think:start|>",), ("<|think:end|>",), calls_end_it=True),
    in_template=("<|tool_call:start|>",),
)

# <function name="f"><param name="a">1</param></function>; a value may stand in <![CDATA[ ]]>
_MINICPM5 = Format(
    (
        Calls(
            ('<function name="',),
            (
                Mark('<function name="'),
                Name(('">',)),
                Parameters(
                    ('<param name="', '">'),
                    ("", "</param>"),
                    stops=('<param name="', "</function>"),
                    end="</function>",
                    before=('<function name="',),
                    wrap=("<![CDATA[", "]]>"),
                ),
            ),
            several=True,
            begin_is_read=False,
        ),
    ),
    in_template=('<function name="', "<param name="),
)

# <tool_call>, then per call: <invoke name="f"><a>1</a><b><item>x</item></b></invoke>; </tool_call>; all with a tag in front
_M3_TAG = "]<]minimax[>["
_MINIMAX_M3 = Format(
    (
        Calls(
            (f"{_M3_TAG}<tool_call>",),
            (
                Mark(f'{_M3_TAG}<invoke name="'),
                Name(('">',)),
                Elements(_M3_TAG, f"{_M3_TAG}</invoke>", (f'{_M3_TAG}<invoke name="', f"{_M3_TAG}</tool_call>")),
            ),
            several=True,
            end=f"{_M3_TAG}</tool_call>",
        ),
    ),
    Thinking(("<mm:think>",), ("</mm:think>",)),
    in_template=(_M3_TAG,),
)

# <dots_function_call> invocations </dots_function_call>, or one call as JSON between them
_DOTS = Format(
    (
        Calls(("<dots_function_call>",), (Envelope(),), opening="{", opening_is_read=False, end="</dots_function_call>"),
        _invocations("<dots_function_call>", "</dots_function_call>"),
    ),
    in_template=("<dots_function_call>",),
)

# <|tools_prefix|>[{"f": {"a": 1}}, ...]<|tools_suffix|>
_APERTUS = Format(
    (Calls(("<|tools_prefix|>",), (Keyed(),), opening="[", several=True, between=",", end="]", closing="<|tools_suffix|>"),),
    Thinking(("<|inner_prefix|>",), ("<|inner_suffix|>",)),
    in_template=("<|tools_prefix|>",),
)

# text<|message_sep|>, then: function call<|role_sep|>{"name": "f", "arguments": {"a": 1}}, or the same after <|function_call|>
_GIGACHAT3 = Format(
    (Calls(("function call<|role_sep|>", "<|function_call|>"), (Envelope(),)),),
    frames=("<|message_sep|>",),
    in_template=("<|message_sep|>", "<|role_sep|>"),
)

# Blocks, each between <|message_model|>, maybe a name, one of the marks that say what it is, and <|end_message|>:
# <|content_thinking|>, <|content_text|>, <|content_invoke_tool_json|>{"name": "f", "args": {"a": 1}}
_INKLING_END = ("<|end_message|>", "<|content_model_end_sampling|>")
_INKLING_TEXT = ("<|content_text|>", "<|content_invoke_tool_text|>", "<|content_tool_error|>")
_INKLING = Format(
    (Calls(("<|content_invoke_tool_json|>",), (Envelope(argument_keys=("args",)),), end=_INKLING_END[0]),),
    Thinking(("<|content_thinking|>",), _INKLING_END, reopen=True, calls_end_it=True),
    frames=(*_INKLING_END, *_INKLING_TEXT),
    header=("<|message_model|>", "<|content_thinking|>", "<|content_invoke_tool_json|>", *_INKLING_TEXT),
    in_template=("<|content_invoke_tool_json|>",),
)

# to=self<|message|>...<|eom|><|start|>assistant to=f<|message|> calls <|eom|><|start|>assistant to=user<|message|>...<|eot|>
_MUSE_GLIMMER = Format(
    channels=Channels(
        start="<|start|>",
        channel="",
        message="<|message|>",
        ends=("<|eom|>", "<|eot|>"),
        reasoning=("self",),
        final=" to=user<|message|>",
        recipient="to=",
        prefix="",
        readers=("user",),
        calls=_invocations(f"<{_ATEM}function_calls>", f"</{_ATEM}function_calls>", _ATEM),
    ),
    in_template=(f"<{_ATEM}function_calls>",),
)

# <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}
_HARMONY = Format(
    channels=Channels(
        start="<|start|>",
        channel="<|channel|>",
        message="<|message|>",
        ends=("<|end|>", "<|call|>", "<|return|>"),
        reasoning=("analysis",),
        final="<|channel|>final<|message|>",
        recipient="to=",
        prefix="functions.",
    ),
    in_template=("<|channel|>", "<|message|>"),
)

# functools[{"name": "f", "arguments": {"a": 1}}, ...], or between <|tool_call|> and <|/tool_call|>
_PHI = Format((_list("functools", "<|tool_call|>", closing="<|/tool_call|>"),), in_template=("<|tool|>", "<|/tool|>"))

# <tool_calls>[{"name": "f", "arguments": {"a": 1}}, ...]</tool_calls>, or the calls one by one, on lines of their own
_TOOL_CALLS = (
    _list("<tool_calls>", closing="</tool_calls>"),
    Calls(("<tool_calls>",), (Envelope(),), several=True, end="</tool_calls>"),
)
# <think>...</think><answer>...</answer>
_HUNYUAN = Format(_TOOL_CALLS, _THINK, frames=("<answer>", "</answer>"), in_template=("<tool_calls>", "<answer>"))
# ...</think><response>...</response>
_ERNIE = Format(_HERMES.calls, _THINKS_AT_ONCE, frames=("<response>", "</response>"), in_template=("<tool_call>", "<response>"))

# <|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f", "parameters": {"a": 1}}]<|END_ACTION|>
_COHERE = Format(
    (_list("<|START_ACTION|>", closing="<|END_ACTION|>", envelope=Envelope(("tool_name", "name"))),),
    Thinking(("<|START_THINKING|>",), ("<|END_THINKING|>",), calls_end_it=True),
    frames=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    noise=("<co>", "</co>"),  # citations: <co>words</co: 0:[1]>
    spans=(("</co:", ">"), ("<co:", ">")),
    in_template=("<|START_ACTION|>",),
)


# call:f{a:<|"|>x<|"|>,n:1} between two marks, once per call
def _gemma(begin: str, end: str, mark: str, thinking: Thinking | None = None) -> Format:
    calls = Calls((begin,), (Mark("call:"), Name((), left=("{",)), Marked(mark)), end=end)
    return Format((calls,), thinking, in_template=(begin,))


_GEMMA4 = _gemma(
    "<|tool_call>",
    "<tool_call|>",
    '<|"|>',
    Thinking(("<|channel>", "<|channel>thought", "<|channel>thought\n"), ("<channel|>",), reopen=True, calls_end_it=True),
)

# <|tool_call_start|>[f(a=1), g(b='x')]<|tool_call_end|>
_LFM2 = Format(
    (
        Calls(
            ("<|tool_call_start|>",),
            (PythonCall(),),
            opening="[",
            several=True,
            between=",",
            end="]",
            closing="<|tool_call_end|>",
        ),
        Calls(("<|tool_call_start|>",), (PythonCall(),), several=True, end="<|tool_call_end|>"),
    ),
    in_template=("<|tool_call_start|>",),
)

# <function_calls>f(a=1), one call on every line, and </function_calls>
_OLMO = Format(
    (Calls(("<function_calls>",), (PythonCall(),), several=True, end="</function_calls>"),),
    _THINK,
    in_template=("<function_calls>",),
)

# [{"name": "f", "arguments": {"a": 1}}, ...] by itself, after a mark, or in a block of code
_XLAM = (
    _list("[TOOL_CALLS]", "<tool_call>", closing="</tool_call>"),
    Calls(
        ("```json", "```"), (Envelope(strict=True),), "[", end="]", closing="```", several=True, between=",",
        markerless=True, anywhere=True,
    ),
    Calls(("[",), (Envelope(strict=True),), end="]", several=True, between=",", markerless=True, anywhere=True),
)  # fmt: skip

# <|action_start|><|plugin|>{"name": "f", "parameters": {"a": 1}}<|action_end|>
_INTERNLM = Format(
    (Calls(("<|action_start|>",), (Mark("<|plugin|>"), Envelope()), end="<|action_end|>"),), in_template=("<|action_start|>",)
)

# For models whose template does not read tools. The prompt asks for
# <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>. A list of such calls, one in a block of code, or one by itself
# is read, too, if it calls a tool of the request.
GENERIC = Format(
    (
        _XLAM[0],
        *_HERMES.calls,
        _XLAM[1],
        Calls(("```json", "```"), (Envelope(strict=True),), end="```", markerless=True, anywhere=True),
        _XLAM[2],
        _JSON_CALLS,
    ),
    noise=("<|python_tag|>",),
)

BUILT_IN: dict[str, Format] = {
    "openai": _HARMONY,
    "openai_gptoss": _HARMONY,
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_v31": _DEEPSEEK_V31,
    "deepseek_v32": _dsml("function_calls"),
    "deepseek_v4": _dsml("tool_calls"),
    "step3": _STEP3,
    "kimi_k2": _KIMI,
    "kimi_k3": _KIMI_K3,
    "hy_v3": hy_v3(),
    "glm45": _GLM,
    "glm47": _GLM,
    "ling3": Format(_GLM.calls, _THINK_UNTIL_CALLS),
    "poolside_v1": Format(_GLM.calls, _THINK_UNTIL_CALLS),
    "qwen3_coder": _QWEN_CODER,
    "qwen3_xml": _QWEN_CODER,
    "seed_oss": _SEED,
    "minimax_m2": _MINIMAX_M2,
    "minimax_m2_append_think": Format(thinking=Thinking(("<think>",), ("</think>",), as_text=True)),
    "minimax_m3": _MINIMAX_M3,
    "minicpm5": _MINICPM5,
    "solar_open2": _SOLAR_OPEN2,
    "dots": _DOTS,
    "apertus": _APERTUS,
    "gigachat3": _GIGACHAT3,
    "inkling": _INKLING,
    "muse_glimmer": _MUSE_GLIMMER,
    "gemma4": _GEMMA4,
    "functiongemma": _gemma("<start_function_call>", "<end_function_call>", "<escape>"),
    "lfm2": _LFM2,
    "olmo3": _OLMO,
    "cohere_command": _COHERE,
    "cohere_command3": _COHERE,
    "cohere_command4": _COHERE,
    "internlm": _INTERNLM,
    "longcat": _tagged("<longcat_tool_call>", "</longcat_tool_call>", ("<longcat_tool_call>",)),
    "hunyuan_a13b": _HUNYUAN,
    "jamba": Format(_TOOL_CALLS, in_template=("<tool_calls>",)),
    "minimax": Format(_TOOL_CALLS, _THINK),
    "ernie45": _ERNIE,
    "mistral": _MISTRAL,
    "phi4_mini_json": _PHI,
    "granite": _GRANITE,
    "llama4_pythonic": Format((_PYTHONIC,), noise=("<|python_start|>", "<|python_end|>"), in_template=("<|python_start|>",)),
    "llama3_json": _LLAMA_JSON,
    "llama4_json": _LLAMA_JSON,
    "hermes": _HERMES,
    "granite4": _HERMES,
    "granite-20b-fc": _tagged("<function_call>", "", ("<function_call>",)),
    "pythonic": Format((_PYTHONIC,)),
    "xlam": Format(_XLAM),
    "generic": GENERIC,
    "mimo": Format(_QWEN_CODER.calls, _THINK),
    "step3p5": Format(_QWEN_CODER.calls, _THINK),
    "qwen3": Format(thinking=_THINK, in_template=("</think>",)),
    "nemotron": Format(thinking=_THINKS_AT_ONCE),
    "nemotron_v3": Format(thinking=_THINKS_AT_ONCE),
    "deepseek_r1": Format(thinking=_THINKS_AT_ONCE),
    "holo2": Format(thinking=_THINKS_AT_ONCE),
    "think": Format(thinking=_THINK),
}

# formats whose marks end with a suffix that the tokenizer's configuration names (`token_suffix`)
SUFFIXED: dict[str, Callable[[str], Format]] = {"hy_v3": hy_v3}


# What a grammar makes a model write when tools must be called, whatever its own format is.

# [{"name": "f", "parameters": {"a": 1}}, ...]
REQUIRED = Calls(("[",), (Envelope(),), several=True, between=",", end="]", markerless=True)


def named(name: str) -> Calls:
    """The arguments, and nothing else."""
    return Calls(("{",), (Known(name), Json()), markerless=True, begin_is_read=False)
