"""The formats by the names vLLM gives their parsers. What a model of each family writes is in the comment above its row."""

from quire.text.parse.format import Calls, Channels, Format, Thinking
from quire.text.parse.parts import Envelope, Id, Json, Known, Mark, Marked, Maybe, Name, Parameters, Part, PythonCall

_THINK = Thinking(("<think>",), ("</think>",))
_THINKS_AT_ONCE = Thinking(("<think>",), ("</think>",), opened=True)


def _tagged(begin: str, end: str, in_template: tuple[str, ...], frames: tuple[str, ...] = ()) -> Format:
    """One call in JSON between two marks, once per call."""
    return Format((Calls((begin,), (Envelope(),), end=end),), in_template=in_template, frames=frames)


def _list(*begin: str, closing: str, envelope: Envelope = Envelope()) -> Calls:  # noqa: B008 it is frozen
    """Calls in a JSON list."""
    return Calls(begin, (envelope,), opening="[", several=True, between=",", end="]", closing=closing)


# <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>, once per call
_HERMES = _tagged("<tool_call>", "</tool_call>", ("<tool_call>", "arguments"))

# {"name": "f", "parameters": {"a": 1}}; {"name": ...          also behind text
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
    function: tuple[Part, ...] = (Mark("<function="), Name((">",)), parameters)
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
    """<invoke name="f"><parameter name="a">1</parameter></invoke>, several between two marks; `tag` in front of every name."""
    parameters = Parameters((f'<{tag}parameter name="', '">'), ("", f"</{tag}parameter>"), kinds, end=f"</{tag}invoke>")
    return Calls((begin,), (Mark(f'<{tag}invoke name="'), Name(('">',)), parameters), several=True, end=end)


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


def _deepseek(*call: Part, in_template: tuple[str, ...] = ()) -> Format:
    parts = (Mark(_DEEPSEEK_CALL), *call, Mark(_DEEPSEEK_CALL_END))
    calls = Calls((_DEEPSEEK_BEGIN,), parts, end=_DEEPSEEK_END, several=True)
    return Format((calls,), _THINK, in_template=(_DEEPSEEK_BEGIN, *in_template))


# begin, then per call: call begin, function, separator, f, a line end, and the arguments in a fenced block of json
_DEEPSEEK_V3 = _deepseek(
    Mark("function"), Mark(_DEEPSEEK_SEPARATOR), Name(("\n",)), Mark("```json"), Json(), Mark("```"), in_template=("```json",)
)
# begin, then per call: call begin, f, separator, the arguments
_DEEPSEEK_V31 = _deepseek(Name((_DEEPSEEK_SEPARATOR,)), Json())

# calls begin, then per call: call begin, function, separator, an invocation, call end; calls end
_STEP3 = Format(
    (
        Calls(
            ("<｜tool_calls_begin｜>",),
            (
                Mark("<｜tool_call_begin｜>"),
                Mark("function"),
                Mark("<｜tool_sep｜>"),
                Mark('<steptml:invoke name="'),
                Name(('">',)),
                Parameters(('<steptml:parameter name="', '">'), ("", "</steptml:parameter>"), end="</steptml:invoke>"),
                Mark("<｜tool_call_end｜>"),
            ),
            several=True,
            end="<｜tool_calls_end｜>",
        ),
    ),
    _THINKS_AT_ONCE,
    in_template=("<｜tool_calls_begin｜>",),
)

# <|tool_call|>[{"name": "f", "arguments": {"a": 1}}, ...], in later models between <tool_call> and </tool_call>
_GRANITE = Format(
    (
        _list("<|tool_call|>", "<tool_call>", closing="</tool_call>"),
        Calls(("<|tool_call|>", "<tool_call>"), (Envelope(),), end="</tool_call>"),
    ),
    Thinking(("Here is my thought process:", "Here's my thought process:"), ("Here is my response:", "Here's my response:")),
    in_template=("<|tool_call|>", "<|start_of_role|>"),
)

# <tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>, mostly every pair on a line of its own
_GLM = Format(
    (
        Calls(
            ("<tool_call>",),
            (
                Name(("\n",), left=("<arg_key>", "</tool_call>")),
                Parameters(("<arg_key>", "</arg_key>"), ("<arg_value>", "</arg_value>"), before=("</tool_call>",)),
            ),
            end="</tool_call>",
        ),
    ),
    _THINK,
    in_template=("<arg_key>",),
)

# section begin, then per call: call begin, functions.f:0, argument begin, the arguments, call end; section end
_KIMI = Format(
    (
        Calls(
            ("<|tool_calls_section_begin|>",),
            (
                Mark("<|tool_call_begin|>"),
                Name(("<|tool_call_argument_begin|>",), written=r"(?:functions\.)?(.+):\d+"),
                Json(),
                Mark("<|tool_call_end|>"),
            ),
            end="<|tool_calls_section_end|>",
            several=True,
        ),
    ),
    Thinking(("<think>",), ("</think>",), calls_end_it=True),
    in_template=("<|tool_calls_section_begin|>",),
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
    Thinking(("<|channel>", "<|channel>thought", "<|channel>thought\n"), ("<channel|>",), calls_end_it=True),
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

# [{"name": "f", "arguments": {"a": 1}}, ...] by itself, behind a mark, or in a block of code
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

# For models whose template says nothing: <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call> is what they are asked to
# write; a list of such calls, one in a block of code, or one by itself is understood, too, if it calls a tool of the request.
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
    "glm45": _GLM,
    "glm47": _GLM,
    "qwen3_coder": _QWEN_CODER,
    "qwen3_xml": _QWEN_CODER,
    "seed_oss": _SEED,
    "minimax_m2": _MINIMAX_M2,
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


# What a grammar makes a model write when tools must be called, whatever its own format is.

# [{"name": "f", "parameters": {"a": 1}}, ...]
REQUIRED = Calls(("[",), (Envelope(),), several=True, between=",", end="]", markerless=True)


def named(name: str) -> Calls:
    """The arguments, and nothing else."""
    return Calls(("{",), (Known(name), Json()), markerless=True, begin_is_read=False)
