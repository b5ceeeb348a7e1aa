"""Answers as models of each family write them, from what they should be read as."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from quire.text.parse.events import Event, Reasoning, Text, ToolArguments, ToolEnd, ToolStart

Call = tuple[str, dict[str, Any]]


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def hermes(calls: list[Call]) -> str:
    return "".join(
        f'\n<tool_call>\n{{"name": {dumps(name)}, "arguments": {dumps(args)}}}\n</tool_call>' for name, args in calls
    )


def _envelopes(calls: list[Call], key: str = "arguments") -> str:
    return ", ".join(f'{{"name": {dumps(name)}, "{key}": {dumps(args)}}}' for name, args in calls)


def llama3_json(calls: list[Call]) -> str:
    return "; ".join(f'{{"name": {dumps(name)}, "parameters": {dumps(args)}}}' for name, args in calls)


def pythonic(calls: list[Call]) -> str:
    written = [f"{name}({', '.join(f'{key}={value!r}' for key, value in args.items())})" for name, args in calls]
    return f"[{', '.join(written)}]" if calls else ""


def mistral_old(calls: list[Call]) -> str:
    return f"[TOOL_CALLS] [{_envelopes(calls)}]" if calls else ""


def mistral(calls: list[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{dumps(args)}" for name, args in calls)


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else dumps(value)


def qwen3_coder(calls: list[Call]) -> str:
    out = ""
    for name, args in calls:
        out += f"\n<tool_call>\n<function={name}>\n"
        out += "".join(f"<parameter={key}>\n{_as_text(value)}\n</parameter>\n" for key, value in args.items())
        out += "</function>\n</tool_call>"
    return out


def seed_oss(calls: list[Call]) -> str:
    inner = qwen3_coder(calls).replace("<tool_call>", "").replace("</tool_call>", "")
    return f"<seed:tool_call>{inner}</seed:tool_call>" if calls else ""


def minimax_m2(calls: list[Call]) -> str:
    inner = ""
    for name, args in calls:
        pairs = (f'<parameter name="{key}">{_as_text(value)}</parameter>\n' for key, value in args.items())
        inner += f'\n<invoke name="{name}">\n{"".join(pairs)}</invoke>'
    return f"<minimax:tool_call>{inner}\n</minimax:tool_call>" if calls else ""


def glm45(calls: list[Call]) -> str:
    out = ""
    for name, args in calls:
        pairs = (f"<arg_key>{key}</arg_key>\n<arg_value>{_as_text(value)}</arg_value>\n" for key, value in args.items())
        out += f"\n<tool_call>{name}\n{''.join(pairs)}</tool_call>"
    return out


def deepseek_v3(calls: list[Call]) -> str:
    inner = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{dumps(args)}\n```<｜tool▁call▁end｜>"
        for name, args in calls
    )
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>" if calls else ""


def deepseek_v31(calls: list[Call]) -> str:
    inner = "".join(f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{dumps(args)}<｜tool▁call▁end｜>" for name, args in calls)
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>" if calls else ""


def granite(calls: list[Call]) -> str:
    return f"<|tool_call|>[{_envelopes(calls)}]" if calls else ""


def kimi_k2(calls: list[Call]) -> str:
    inner = "".join(
        f"<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>{dumps(args)}<|tool_call_end|>"
        for i, (name, args) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>" if calls else ""


def phi4_mini_json(calls: list[Call]) -> str:
    return f"functools[{_envelopes(calls)}]" if calls else ""


def tagged(begin: str, end: str) -> Callable[[list[Call]], str]:
    return lambda calls: "".join(
        f'{begin}\n{{"name": {dumps(name)}, "arguments": {dumps(args)}}}\n{end}' for name, args in calls
    )


def tool_calls(calls: list[Call]) -> str:
    return f"<tool_calls>[{_envelopes(calls)}]</tool_calls>" if calls else ""


def minimax(calls: list[Call]) -> str:
    lines = "\n".join(f'{{"name": {dumps(name)}, "arguments": {dumps(args)}}}' for name, args in calls)
    return f"<tool_calls>\n{lines}\n</tool_calls>" if calls else ""


def internlm(calls: list[Call]) -> str:
    return "".join(
        f'<|action_start|><|plugin|>\n{{"name": {dumps(name)}, "parameters": {dumps(args)}}}<|action_end|>\n'
        for name, args in calls
    )


def cohere(calls: list[Call]) -> str:
    written = [
        f'{{"tool_call_id": "{i}", "tool_name": {dumps(name)}, "parameters": {dumps(args)}}}'
        for i, (name, args) in enumerate(calls)
    ]
    return f"<|START_ACTION|>[\n    {', '.join(written)}\n]<|END_ACTION|>" if calls else ""


def cohere_answer(reasoning: str, text: str, calls: list[Call]) -> str:
    thought = f"<|START_THINKING|>{reasoning}<|END_THINKING|>" if reasoning else ""
    return thought + (f"<|START_RESPONSE|>{text}<|END_RESPONSE|>" if text else "") + cohere(calls)


def dsml(wrapper: str) -> Callable[[list[Call]], str]:
    def write(calls: list[Call]) -> str:
        inner = ""
        for name, args in calls:
            pairs = "".join(
                f'<｜DSML｜parameter name="{key}" string="{str(isinstance(value, str)).lower()}">{_as_text(value)}'
                "</｜DSML｜parameter>\n"
                for key, value in args.items()
            )
            inner += f'\n<｜DSML｜invoke name="{name}">\n{pairs}</｜DSML｜invoke>'
        return f"<｜DSML｜{wrapper}>{inner}\n</｜DSML｜{wrapper}>" if calls else ""

    return write


def step3(calls: list[Call]) -> str:
    inner = ""
    for name, args in calls:
        pairs = "".join(
            f'<steptml:parameter name="{key}">{_as_text(value)}</steptml:parameter>\n' for key, value in args.items()
        )
        inner += (
            f'<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{name}">\n{pairs}</steptml:invoke>'
            "<｜tool_call_end｜>\n"
        )
    return f"<｜tool_calls_begin｜>{inner}<｜tool_calls_end｜>" if calls else ""


def _gemma_value(value: Any, mark: str) -> str:
    if isinstance(value, str):
        return f"{mark}{value}{mark}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{mark}{key}{mark}:{_gemma_value(one, mark)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_gemma_value(one, mark) for one in value) + "]"
    return dumps(value)


def gemma(begin: str, end: str, mark: str) -> Callable[[list[Call]], str]:
    def write(calls: list[Call]) -> str:
        return "".join(
            f"{begin}call:{name}{{{','.join(f'{key}:{_gemma_value(value, mark)}' for key, value in args.items())}}}{end}"
            for name, args in calls
        )

    return write


def hy_v3(calls: list[Call]) -> str:
    inner = ""
    for name, args in calls:
        pairs = (f"<arg_key>{key}</arg_key>\n<arg_value>{_as_text(value)}</arg_value>\n" for key, value in args.items())
        inner += f"<tool_call>{name}<tool_sep>\n{''.join(pairs)}</tool_call>\n"
    return f"<tool_calls>\n{inner}</tool_calls>" if calls else ""


_KIMI_K3_TYPES = {str: "string", bool: "boolean", int: "number", float: "number", dict: "object", list: "array"}


def kimi_k3(reasoning: str, text: str, calls: list[Call]) -> str:
    out = f"<|open|>think<|sep|>{reasoning}<|close|>think<|sep|>" if reasoning else ""
    out += f"<|open|>response<|sep|>{text}<|close|>response<|sep|>"
    inner = ""
    for i, (name, args) in enumerate(calls):
        inner += f'<|open|>call tool="{name}" index="{i}"<|sep|>'
        inner += "".join(
            f'<|open|>argument key="{key}" type="{_KIMI_K3_TYPES[type(value)]}"<|sep|>{_as_text(value)}<|close|>argument<|sep|>'
            for key, value in args.items()
        )
        inner += "<|close|>call<|sep|>"
    return out + (f"<|open|>tools<|sep|>{inner}<|close|>tools<|sep|>" if calls else "") + "<|close|>message<|sep|>"


def solar_open2(calls: list[Call]) -> str:
    out = ""
    for name, args in calls:
        pairs = "".join(
            f"<|tool_arg:start|>{key}<|tool_arg:value|>{_as_text(value)}<|tool_arg:end|>\n" for key, value in args.items()
        )
        out += f"<|tool_call:start|>{name}\n{pairs}<|tool_call:end|>\n"
    return out


def minicpm5(calls: list[Call]) -> str:
    out = ""
    for name, args in calls:
        pairs = (f'<param name="{key}">{_as_text(value)}</param>' for key, value in args.items())
        out += f'\n<function name="{name}">{"".join(pairs)}</function>'
    return out


def _invocations(calls: list[Call], tag: str = "") -> str:
    out = ""
    for name, args in calls:
        pairs = (f'<{tag}parameter name="{key}">{_as_text(value)}</{tag}parameter>\n' for key, value in args.items())
        out += f'\n<{tag}invoke name="{name}">\n{"".join(pairs)}</{tag}invoke>\n'
    return out


def dots(calls: list[Call]) -> str:
    return f"<dots_function_call>{_invocations(calls)}</dots_function_call>" if calls else ""


def apertus(calls: list[Call]) -> str:
    written = ", ".join(f"{{{dumps(name)}: {dumps(args)}}}" for name, args in calls)
    return f"<|tools_prefix|>[{written}]<|tools_suffix|>" if calls else ""


def gigachat3(calls: list[Call]) -> str:
    return "".join(
        f'<|message_sep|>\n\nfunction call<|role_sep|>\n{{"name": {dumps(name)}, "arguments": {dumps(args)}}}'
        for name, args in calls
    )


def inkling(reasoning: str, text: str, calls: list[Call]) -> str:
    blocks = [f"<|content_thinking|>{reasoning}"] if reasoning else []
    blocks += [f"<|content_text|>{text}"] if text else []
    blocks += [
        f'{name if i % 2 else ""}<|content_invoke_tool_json|>{{"name":{dumps(name)},"args":{dumps(args)}}}'
        for i, (name, args) in enumerate(calls)
    ]
    return "<|end_message|><|message_model|>".join(blocks) + "<|end_message|><|content_model_end_sampling|>"


def muse_glimmer(reasoning: str, text: str, calls: list[Call]) -> str:
    messages = [f" to=self<|message|>{reasoning}<|eom|>"] if reasoning else []
    messages += [f" to=user<|message|>{text}<|eom|>"] if text else []
    messages += [
        f" to={name}<|message|><atem:function_calls>{_invocations([(name, args)], 'atem:')}</atem:function_calls><|eom|>"
        for name, args in calls
    ]
    return "<|start|>assistant".join(messages)


M3 = "]<]minimax[>["


def _m3_element(name: str, value: Any) -> str:
    if isinstance(value, dict):
        value = "".join(_m3_element(key, one) for key, one in value.items())
    elif isinstance(value, list):
        value = "".join(_m3_element("item", one) for one in value)
    return f"{M3}<{name}>{_as_text(value)}{M3}</{name}>"


def minimax_m3(calls: list[Call]) -> str:
    inner = "".join(
        f'{M3}<invoke name="{name}">{"".join(_m3_element(key, value) for key, value in args.items())}{M3}</invoke>\n'
        for name, args in calls
    )
    return f"{M3}<tool_call>\n{inner}{M3}</tool_call>" if calls else ""


def lfm2(calls: list[Call]) -> str:
    return f"<|tool_call_start|>{pythonic(calls)}<|tool_call_end|>" if calls else ""


def olmo3(calls: list[Call]) -> str:
    lines = (f"{name}({', '.join(f'{key}={value!r}' for key, value in args.items())})\n" for name, args in calls)
    return f"<function_calls>\n{''.join(lines)}</function_calls>" if calls else ""


def xlam(calls: list[Call]) -> str:
    return f"\n```json\n[{_envelopes(calls)}]\n```" if calls else ""


def required(calls: list[Call]) -> str:
    return f"[{_envelopes(calls, 'parameters')}]" if calls else ""


def think(reasoning: str) -> str:
    return f"<think>\n{reasoning}\n</think>\n\n" if reasoning else ""


def mistral_think(reasoning: str) -> str:
    return f"[THINK]{reasoning}[/THINK]" if reasoning else ""


def granite_think(reasoning: str) -> str:
    return f"Here is my thought process: {reasoning}\n\nHere is my response: " if reasoning else ""


def harmony(reasoning: str, text: str, calls: list[Call]) -> str:
    messages = []
    if reasoning:
        messages.append(f"<|channel|>analysis<|message|>{reasoning}<|end|>")
    if text:
        messages.append(f"<|channel|>{'commentary' if calls else 'final'}<|message|>{text}<|end|>")
    messages += [
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{dumps(args)}<|call|>" for name, args in calls
    ]
    return "<|start|>assistant".join(messages)


def _after(tools: Callable[[list[Call]], str], thought: Callable[[str], str]) -> Callable[[str, str, list[Call]], str]:
    return lambda reasoning, text, calls: thought(reasoning) + text + tools(calls)


def _instead(tools: Callable[[list[Call]], str], thought: Callable[[str], str]) -> Callable[[str, str, list[Call]], str]:
    """Formats without markers: an answer is either calls or text."""
    return lambda reasoning, text, calls: thought(reasoning) + (tools(calls) if calls else text)


Writer = Callable[[str, str, list[Call]], str]
# (tool format, reasoning format, how it is written, may text and calls stand together?)
FAMILIES: dict[str, tuple[str, str, Writer, bool]] = {
    "hermes": ("hermes", "qwen3", _after(hermes, think), True),
    "hermes+r1": ("hermes", "deepseek_r1", _after(hermes, lambda text: f"{text}</think>"), True),
    "llama3_json": ("llama3_json", "qwen3", _instead(llama3_json, think), False),
    "pythonic": ("pythonic", "qwen3", _instead(pythonic, think), False),
    "llama4_pythonic": (
        "llama4_pythonic", "qwen3",
        _instead(lambda calls: f"<|python_start|>{pythonic(calls)}<|python_end|>" if calls else "", think), False,
    ),
    "mistral": ("mistral", "mistral", _after(mistral, mistral_think), True),
    "mistral-old": ("mistral", "mistral", _after(mistral_old, mistral_think), True),
    "qwen3_coder": ("qwen3_coder", "qwen3", _after(qwen3_coder, think), True),
    "seed_oss": (
        "seed_oss", "seed_oss", _after(seed_oss, lambda text: think(text).replace("think>", "seed:think>")), True
    ),
    "minimax_m2": ("minimax_m2", "minimax_m2", _after(minimax_m2, think), True),
    "deepseek_v3": ("deepseek_v3", "deepseek_v3", _after(deepseek_v3, think), True),
    "deepseek_v31": ("deepseek_v31", "deepseek_v31", _after(deepseek_v31, think), True),
    "granite": ("granite", "granite", _after(granite, granite_think), True),
    "glm45": ("glm45", "glm45", _after(glm45, think), True),
    "kimi_k2": ("kimi_k2", "kimi_k2", _after(kimi_k2, think), True),
    "openai": ("openai", "openai_gptoss", harmony, True),
    "phi4_mini_json": ("phi4_mini_json", "qwen3", _after(phi4_mini_json, think), True),
    "deepseek_v32": ("deepseek_v32", "deepseek_v3", _after(dsml("function_calls"), think), True),
    "deepseek_v4": ("deepseek_v4", "deepseek_v4", _after(dsml("tool_calls"), think), True),
    "step3": ("step3", "step3", _after(step3, lambda text: f"{text}</think>"), True),
    "gemma4": (
        "gemma4", "gemma4",
        _after(
            gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
            lambda text: f"<|channel>thought\n{text}<channel|>" if text else "",
        ),
        True,
    ),
    "functiongemma": (
        "functiongemma", "qwen3", _after(gemma("<start_function_call>", "<end_function_call>", "<escape>"), think), True
    ),
    "lfm2": ("lfm2", "qwen3", _after(lfm2, think), True),
    "olmo3": ("olmo3", "olmo3", _after(olmo3, think), True),
    "xlam": ("xlam", "qwen3", _after(xlam, think), True),
    "xlam-list": ("xlam", "qwen3", _after(lambda calls: f"[{_envelopes(calls)}]" if calls else "", think), True),
    "jamba": ("jamba", "qwen3", _after(tool_calls, think), True),
    "internlm": ("internlm", "qwen3", _after(internlm, think), True),
    "hunyuan_a13b": (
        "hunyuan_a13b", "hunyuan_a13b",
        lambda reasoning, text, calls: f"{think(reasoning)}<answer>\n{text}{tool_calls(calls)}\n</answer>", True,
    ),
    "ernie45": (
        "ernie45", "ernie45",
        lambda reasoning, text, calls: (
            f"{reasoning}\n</think>\n\n" + (f"<response>\n{text}\n</response>\n" if text else "") + hermes(calls)
        ), True,
    ),
    "minimax": ("minimax", "minimax", _after(minimax, think), True),
    "cohere_command3": ("cohere_command3", "cohere_command3", cohere_answer, True),
    "longcat": ("longcat", "qwen3", _after(tagged("<longcat_tool_call>", "</longcat_tool_call>"), think), True),
    "granite-20b-fc": ("granite-20b-fc", "qwen3", _after(tagged("<function_call>", ""), think), True),
    "mimo": ("mimo", "mimo", _after(qwen3_coder, think), True),
    "nemotron_v3": ("qwen3_coder", "nemotron_v3", _after(qwen3_coder, lambda text: f"{text}\n</think>\n"), True),
    "hy_v3": ("hy_v3", "hy_v3", _after(hy_v3, think), True),
    "ling3": ("ling3", "ling3", _after(glm45, think), True),
    "poolside_v1": ("poolside_v1", "poolside_v1", _after(glm45, think), True),
    "kimi_k3": ("kimi_k3", "kimi_k3", kimi_k3, True),
    "solar_open2": (
        "solar_open2", "solar_open2",
        _after(solar_open2, lambda text: f"<|think:start|>{text}<|think:end|>" if text else ""), True,
    ),
    "minicpm5": ("minicpm5", "qwen3", _after(minicpm5, think), True),
    "dots": ("dots", "qwen3", _after(dots, think), True),
    "dots-json": ("dots", "qwen3", _after(tagged("<dots_function_call>", "</dots_function_call>"), think), True),
    "apertus": (
        "apertus", "apertus",
        _after(apertus, lambda text: f"<|inner_prefix|>{text}<|inner_suffix|>" if text else ""), True,
    ),
    "gigachat3": ("gigachat3", "qwen3", _after(gigachat3, think), True),
    "gigachat3-new": ("gigachat3", "qwen3", _after(tagged("<|function_call|>", ""), think), True),
    "inkling": ("inkling", "inkling", inkling, True),
    "muse_glimmer": ("muse_glimmer", "muse_glimmer", muse_glimmer, True),
    "minimax_m3": (
        "minimax_m3", "minimax_m3",
        _after(minimax_m3, lambda text: f"<mm:think>{text}</mm:think>" if text else ""), True,
    ),
    "generic": ("generic", "qwen3", _after(hermes, think), True),
    "generic-json": ("generic", "qwen3", _after(llama3_json, think), True),
    "llama3_json-prose": ("llama3_json", "qwen3", _after(llama3_json, think), True),
}  # fmt: skip


@dataclass
class Folded:
    """An answer put together again from its events."""

    text: str = ""
    reasoning: str = ""
    calls: list[list[str]] = field(default_factory=list)  # name, arguments
    ends: int = 0

    @classmethod
    def of(cls, events: list[Event]) -> "Folded":
        out = cls()
        for event in events:
            match event:
                case Text(text):
                    out.text += text
                case Reasoning(text):
                    out.reasoning += text
                case ToolStart(index, name):
                    assert index == len(out.calls) == out.ends
                    out.calls.append([name, ""])
                case ToolArguments(index, piece):
                    assert index == len(out.calls) - 1 == out.ends
                    out.calls[index][1] += piece
                case ToolEnd(index):
                    assert index == len(out.calls) - 1 == out.ends
                    out.ends += 1
        return out
