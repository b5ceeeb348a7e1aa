"""The formats by the names vLLM gives their parsers. What a model of each family writes is in the comment above its row."""

from quire.text.parse.format import Calls, Channels, Format, Thinking
from quire.text.parse.parts import Envelope, Id, Json, Known, Mark, Maybe, Name, Parameters, Part, PythonCall

_THINK = Thinking(("<think>",), ("</think>",))

# <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>, once per call
_HERMES = Format((Calls(("<tool_call>",), (Envelope(),), end="</tool_call>"),), in_template=("<tool_call>", "arguments"))

# {"name": "f", "parameters": {"a": 1}}; {"name": ...
_LLAMA_JSON = Format(
    (Calls(("{",), (Envelope(),), several=True, between=";", markerless=True, begin_is_read=False),),
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

# <function=f><parameter=a>1</parameter></function>, every mark on a line of its own
_FUNCTION: tuple[Part, ...] = (
    Mark("<function="),
    Name((">",)),
    Parameters(("<parameter=", ">"), ("", "</parameter>"), lines=True),
    Mark("</function>"),
)
# between <tool_call> and </tool_call>, or marks of another name
_QWEN_CODER = Format((Calls(("<tool_call>",), _FUNCTION, end="</tool_call>"),), in_template=("<tool_call>", "<function="))
_SEED = Format(
    (Calls(("<seed:tool_call>",), _FUNCTION, end="</seed:tool_call>", several=True),),
    Thinking(("<seed:think>",), ("</seed:think>",)),
    in_template=("<seed:tool_call>",),
)

# <minimax:tool_call><invoke name="f"><parameter name="a">1</parameter></invoke> ... </minimax:tool_call>
_MINIMAX = Format(
    (
        Calls(
            ("<minimax:tool_call>",),
            (
                Mark('<invoke name="'),
                Name(('">',)),
                Parameters(('<parameter name="', '">'), ("", "</parameter>")),
                Mark("</invoke>"),
            ),
            end="</minimax:tool_call>",
            several=True,
        ),
    ),
    _THINK,
    in_template=("<minimax:tool_call>",),
)

_DEEPSEEK_BEGIN, _DEEPSEEK_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_DEEPSEEK_CALL, _DEEPSEEK_SEPARATOR, _DEEPSEEK_CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


def _deepseek(*call: Part, in_template: tuple[str, ...]) -> Format:
    parts = (Mark(_DEEPSEEK_CALL), *call, Mark(_DEEPSEEK_CALL_END))
    calls = Calls((_DEEPSEEK_BEGIN,), parts, end=_DEEPSEEK_END, several=True)
    return Format((calls,), _THINK, in_template=(_DEEPSEEK_BEGIN, *in_template))


# begin, then per call: call begin, function, separator, f, a line end, and the arguments in a fenced block of json
_DEEPSEEK_V3 = _deepseek(
    Mark("function"), Mark(_DEEPSEEK_SEPARATOR), Name(("\n",)), Mark("```json"), Json(), Mark("```"), in_template=("```json",)
)
# begin, then per call: call begin, f, separator, the arguments
_DEEPSEEK_V31 = _deepseek(Name((_DEEPSEEK_SEPARATOR,)), Json(), in_template=())

# <|tool_call|>[{"name": "f", "arguments": {"a": 1}}, ...], in later models between <tool_call> and </tool_call>
_GRANITE = Format(
    (
        Calls(("<|tool_call|>", "<tool_call>"), (Envelope(),), "[", end="]", closing="</tool_call>", several=True, between=","),
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
                Parameters(("<arg_key>", "</arg_key>"), ("<arg_value>", "</arg_value>")),
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
_PHI = Format(
    (Calls(("functools", "<|tool_call|>"), (Envelope(),), "[", end="]", closing="<|/tool_call|>", several=True, between=","),),
    in_template=("<|tool|>", "<|/tool|>"),
)

BUILT_IN: dict[str, Format] = {
    "openai": _HARMONY,
    "openai_gptoss": _HARMONY,
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_v31": _DEEPSEEK_V31,
    "kimi_k2": _KIMI,
    "glm45": _GLM,
    "glm47": _GLM,
    "qwen3_coder": _QWEN_CODER,
    "qwen3_xml": _QWEN_CODER,
    "seed_oss": _SEED,
    "minimax_m2": _MINIMAX,
    "mistral": _MISTRAL,
    "phi4_mini_json": _PHI,
    "granite": _GRANITE,
    "llama4_pythonic": Format((_PYTHONIC,), noise=("<|python_start|>", "<|python_end|>"), in_template=("<|python_start|>",)),
    "llama3_json": _LLAMA_JSON,
    "hermes": _HERMES,
    "granite4": _HERMES,
    "pythonic": Format((_PYTHONIC,)),
    "qwen3": Format(thinking=_THINK, in_template=("</think>",)),
    "deepseek_r1": Format(thinking=Thinking(("<think>",), ("</think>",), opened=True)),
    "think": Format(thinking=_THINK),
}


# What a grammar makes a model write when tools must be called, whatever its own format is.

# [{"name": "f", "parameters": {"a": 1}}, ...]
REQUIRED = Calls(("[",), (Envelope(),), several=True, between=",", end="]", markerless=True)


def named(name: str) -> Calls:
    """The arguments, and nothing else."""
    return Calls(("{",), (Known(name), Json()), markerless=True, begin_is_read=False)
