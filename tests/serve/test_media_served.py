"""Images in every protocol of the server: what becomes of them in the prompt, and what is refused."""

import base64
import json
from pathlib import Path

import pytest

from quire.features.media.host import media_of
from serving import error_of, events_of

READER = Path(__file__).parents[1] / "fixtures" / "reader-llava"
PICTURES = [path.read_bytes() for path in sorted((READER / "pictures").iterdir())]
TOKENS = 16  # of a picture
IMAGE, MARK, EQUALS, UNKNOWN = 12, 13, 14, 15  # <image> ? = <unk>


@pytest.fixture
def server(reader_server, monkeypatch):
    """A server that notes the prompts."""
    running = reader_server
    running.prompts, generate = [], running.llm.generate

    def note(prompt, *args, **options):
        running.prompts.append(prompt)
        return generate(prompt, *args, **options)

    monkeypatch.setattr(running.llm, "generate", note)
    yield running
    running.wait_idle()


def encoded(i):
    return base64.b64encode(PICTURES[i]).decode()


def data(i):
    return f"data:image/png;base64,{encoded(i)}"


def part(i):
    return {"type": "image_url", "image_url": {"url": data(i), "detail": "auto"}}


MARK_PART = {"type": "text", "text": "?"}


def user(*content):
    return [{"role": "user", "content": list(content)}]


def claude(i):
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": encoded(i)}}


def say(server, path, **body):
    limit = {"/v1/responses": "max_output_tokens", "/api/chat": "options", "/api/generate": "options"}.get(path, "max_tokens")
    body |= {limit: {"num_predict": 2} if limit == "options" else 16 if path == "/v1/responses" else 2}
    return server.http.post(path, json=body)


def shape(server):
    """Return the tokens of the only prompt, with the position of its picture in place of a picture's tokens."""
    [prompt] = server.prompts
    items, found, i = list(prompt.extras.media), [], 0
    while i < len(prompt.ids):
        if items and items[0].start == i:
            assert prompt.ids[i : i + TOKENS] == [IMAGE] * TOKENS
            found.append(items[0].digest)
            i += items.pop(0).length
        else:
            found.append(prompt.ids[i])
            i += 1
    return found


TOOL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
}
# path, body, and what the prompt is: pictures by number, and tokens
ASKED = {
    "an object": ("/v1/chat/completions", {"messages": user(part(0), MARK_PART)}, [0, "?"]),
    "a string": ("/v1/chat/completions", {"messages": user({"type": "image_url", "image_url": data(1)}, MARK_PART)}, [1, "?"]),
    "input_image": ("/v1/chat/completions", {"messages": user({"type": "input_image", "image_url": data(1)})}, [1]),
    "several between texts": (
        "/v1/chat/completions",
        {"messages": user(MARK_PART, part(2), {"type": "text", "text": "="}, part(0), MARK_PART)},
        ["?", 2, "=", 0, "?"],
    ),
    "the same twice": ("/v1/chat/completions", {"messages": user(part(2), part(2), MARK_PART)}, [2, 2, "?"]),
    "several messages": (
        "/v1/chat/completions",
        {"messages": [*user(part(0), MARK_PART), {"role": "assistant", "content": "="}, *user(part(1), MARK_PART)]},
        [0, "?", "=", 1, "?"],
    ),
    "a result of a tool": (
        "/v1/chat/completions",
        {
            "messages": [
                *user(MARK_PART),
                TOOL,
                {"role": "tool", "tool_call_id": "a", "content": [part(1), {"type": "text", "text": "="}]},
            ]
        },
        ["?", 1, "="],
    ),
    "responses": (
        "/v1/responses",
        {
            "input": [
                {
                    "role": "user",
                    "content": [
                        {"type": "input_image", "image_url": data(1), "detail": "low"},
                        {"type": "input_text", "text": "?"},
                    ],
                }
            ]
        },
        [1, "?"],
    ),
    "a result in responses": (
        "/v1/responses",
        {
            "input": [
                {"role": "user", "content": "?"},
                {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_image", "image_url": data(2)}]},
            ]
        },
        ["?", 2],
    ),
    "anthropic": ("/v1/messages", {"messages": user(claude(0), MARK_PART, claude(1))}, [0, "?", 1]),
    "a result in anthropic": (
        "/v1/messages",
        {
            "messages": [
                *user(MARK_PART),
                {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]},
                *user({"type": "tool_result", "tool_use_id": "a", "content": [claude(2), {"type": "text", "text": "="}]}),
            ]
        },
        ["?", 2, "="],
    ),
    "ollama": ("/api/chat", {"messages": [{"role": "user", "content": "?", "images": [encoded(1), encoded(0)]}]}, [1, 0, "?"]),
    "ollama's prompt": ("/api/generate", {"prompt": "?", "images": [encoded(2)]}, [2, "?"]),
    "ollama's image alone": ("/api/generate", {"images": [encoded(2)]}, [2]),
}


@pytest.mark.parametrize("case", ASKED)
@pytest.mark.parametrize("stream", [False, True])
def test_images_are_where_they_were_sent(server, case, stream):
    path, body, expected = ASKED[case]
    answer = say(server, path, stream=stream, **body)
    assert answer.status_code == 200, answer.text
    assert '"error":{' not in answer.text
    found = [one for one in shape(server) if one != UNKNOWN]  # calls of tools are described
    assert found == [{"?": MARK, "=": EQUALS}.get(one) or digest(server, one) for one in expected]


def digest(server, i):
    """Return the digest of a picture, which was processed before."""
    prompts, server.prompts = server.prompts, []
    say(server, "/v1/chat/completions", messages=user(part(i)))
    [found], server.prompts = shape(server), prompts
    return found


BROKEN = base64.b64encode(PICTURES[0][:60]).decode()
BAD_PART = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{BROKEN}"}}
CHAT = "/v1/chat/completions"
FIVE = [part(0)] * 5
# path, body, status, the beginning of the error and a part of it
REFUSED = {
    "broken": (CHAT, {"messages": user(part(0), BAD_PART)}, 400, "messages[0].content[1]: the image is broken"),
    "broken in responses": (
        "/v1/responses",
        {"input": user({"type": "input_image", "image_url": f"data:image/png;base64,{BROKEN}"})},
        400,
        "input[0].content[0]: the image is broken",
    ),
    "broken in anthropic": (
        "/v1/messages",
        {"messages": user({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": BROKEN}})},
        400,
        "messages[0].content[0]: the image is broken",
    ),
    "broken result in anthropic": (
        "/v1/messages",
        {
            "messages": user(
                MARK_PART,
                {
                    "type": "tool_result",
                    "tool_use_id": "a",
                    "content": [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": BROKEN}}],
                },
            )
        },
        400,
        "messages[0].content[1].content[0]: the image is broken",
    ),
    "broken in ollama": (
        "/api/chat",
        {"messages": [{"role": "user", "images": [encoded(0), BROKEN]}]},
        400,
        "messages[0].images[1]: the image is broken",
    ),
    "broken in ollama's prompt": ("/api/generate", {"prompt": "?", "images": [BROKEN]}, 400, "images[0]: the image is broken"),
    "too many": (CHAT, {"messages": user(*FIVE)}, 400, "messages[0].content[4]: a prompt may have at most 4 images, got 5"),
    "too many in responses": (
        "/v1/responses",
        {"input": user(*[{"type": "input_image", "image_url": data(0)}] * 5)},
        400,
        "input[0].content[4]: a prompt may have at most 4 images",
    ),
    "typed": (
        CHAT,
        {"messages": user(part(0), {"type": "text", "text": "a <image>"})},
        400,
        "messages[0].content[1] has <image>",
    ),
    "typed alone": (CHAT, {"messages": [{"role": "user", "content": "a <image>"}]}, 400, "messages[0].content has <image>"),
    "typed by a tool": (
        CHAT,
        {"messages": [*user(MARK_PART), {"role": "tool", "tool_call_id": "a", "content": "<image>"}]},
        400,
        "messages[1].content has <image>",
    ),
    "typed in a completion": ("/v1/completions", {"prompt": "<image>?"}, 400, "the prompt has tokens of <image>"),
    "tokens in a completion": ("/v1/completions", {"prompt": [10, 12, 13]}, 400, "the prompt has tokens of <image>"),
    "a video": (
        CHAT,
        {"messages": user({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}})},
        400,
        "messages[0].content[0]: video input is not supported by LlavaForConditionalGeneration, which reads image only",
    ),
    "audio": (
        CHAT,
        {"messages": user({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}})},
        400,
        "messages[0].content[0]: parts of type input_audio are not supported",
    ),
    "a stored file": (
        "/v1/responses",
        {"input": user({"type": "input_image", "file_id": "file-1"})},
        400,
        "input[0].content[0]: file_id is not supported",
    ),
    "no address": (
        CHAT,
        {"messages": user({"type": "image_url", "image_url": {}})},
        400,
        "messages[0].content[0]: a part of type image_url needs image_url",
    ),
    "a number": (
        CHAT,
        {"messages": user({"type": "image_url", "image_url": 5})},
        400,
        "messages[0].content[0]: a part of type image_url needs image_url",
    ),
    "base64 without a prefix": (
        CHAT,
        {"messages": user({"type": "image_url", "image_url": {"url": "iVBORw0KGgo="}})},
        400,
        "messages[0].content[0]: its URL must begin with data:, https:, http: or file:. Send base64 as data:image/png;base64,",
    ),
    "a part of another API": (
        CHAT,
        {"messages": user({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}})},
        400,
        "messages[0].content[0]: a part of type image needs image: a URL; got nothing. `source` is read by /v1/messages only",
    ),
    "another option": (
        CHAT,
        {"messages": user({"type": "image_url", "image_url": {"url": data(0), "size": 1}})},
        400,
        "messages[0].content[0].image_url has no 'size'",
    ),
    "an unknown uuid": (
        CHAT,
        {"messages": user({"type": "image_url", "image_url": None, "uuid": "nothing"})},
        400,
        "messages[0].content[0]: no image or video with this uuid",
    ),
    "a source": (
        "/v1/messages",
        {"messages": user({"type": "image", "source": {"type": "file", "file_id": "a"}})},
        400,
        "messages[0].content[0]: the source of an image must",
    ),
    "another place": (
        CHAT,
        {"messages": user({"type": "image_url", "image_url": "file:///etc/passwd"})},
        400,
        "messages[0].content[0]: its file is not below",
    ),
    "no file": (
        CHAT,
        {"messages": user({"type": "image_url", "image_url": "file://{root}/secret/none.png"})},
        422,
        "messages[0].content[0]: it cannot be fetched: the file cannot be read",
    ),
    "elsewhere": (
        CHAT,
        {"messages": user({"type": "image_url", "image_url": "https://secret.example/a.png"})},
        400,
        "messages[0].content[0]: its host is not allowed here",
    ),
    "options of the processor": (
        CHAT,
        {"messages": user(part(0)), "mm_processor_kwargs": {"size": "secret"}},
        400,
        "messages[0].content[0]: the image cannot be processed with these mm_processor_kwargs",
    ),
    "no option of the processor": (
        CHAT,
        {"messages": user(part(0)), "mm_processor_kwargs": {"do_resize": True, "max_pixels": 64}},
        400,
        "messages[0].content[0]: the image cannot be processed with these mm_processor_kwargs: TypeError at 'max_pixels': "
        "the image processor has ",
    ),
    "an unknown part": (
        CHAT,
        {"messages": user({"type": "picture", "picture": "a"})},
        400,
        "messages[0].content[0]: parts of type 'picture' are not known. Send parts of type text or image_url",
    ),
    "options of reading": (
        CHAT,
        {"messages": user(part(0)), "media_io_kwargs": {"image": {"size": 1}}},
        400,
        "media_io_kwargs.image has no 'size'; it has image_mode and rgba_background_color",
    ),
    "a cut": (
        CHAT,
        {"messages": user(part(0), MARK_PART), "truncate_prompt_tokens": 8},
        400,
        "the prompt has 17 tokens, and one with images or videos cannot be cut to 8",
    ),
    "a long prompt": (
        CHAT,
        {
            "messages": [message for _ in range(9) for message in user(part(0), {"type": "text", "text": "?" * 100})][:4]
            + user({"type": "text", "text": "?" * 100})
        },
        400,
        "This model's maximum context length is 512 tokens",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_names_its_part(server, case):
    path, body, status, begin = REFUSED[case]
    answer = say(server, path, **json.loads(json.dumps(body).replace("{root}", str(server.root))))
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    assert message.startswith(begin) and "secret" not in message


def test_usage_counts_the_tokens_of_images(server):
    body = {"messages": user(part(0), MARK_PART, part(1))}
    expected = {"cached_tokens": 0, "multimodal_tokens": {"image": 2 * TOKENS}}
    usage = say(server, CHAT, **body).json()["usage"]
    assert usage["prompt_tokens"] == 2 * TOKENS + 1 and usage["prompt_tokens_details"]["multimodal_tokens"] == {"image": 32}
    *_, last, _ = events_of(say(server, CHAT, stream=True, stream_options={"include_usage": True}, **body).text)
    assert last["usage"]["prompt_tokens_details"].keys() == expected.keys()
    assert "multimodal_tokens" not in say(server, CHAT, messages=user(MARK_PART)).json()["usage"]["prompt_tokens_details"]


def test_tokens_are_counted_without_an_answer(server):
    body = {"messages": user(part(0), MARK_PART)}
    answer = server.http.post("/tokenize", json=body).json()
    assert answer["count"] == TOKENS + 1 and answer["tokens"] == [IMAGE] * TOKENS + [MARK]
    answer = server.http.post("/v1/messages/count_tokens", json={"messages": user(claude(0), MARK_PART)})
    assert answer.json() == {"input_tokens": TOKENS + 1}


def test_a_uuid_stands_for_a_picture_that_was_sent(server):
    named = {**part(1), "uuid": "the second"}
    assert say(server, CHAT, messages=user(named, MARK_PART)).status_code == 200
    for again in ({"image_url": None, "uuid": "the second"}, {"image_url": {"uuid": "the second"}}):
        server.prompts.clear()
        assert say(server, CHAT, messages=user({"type": "image_url", **again}, MARK_PART)).status_code == 200
        assert shape(server) == [digest(server, 1), MARK]


def test_a_local_file_is_read(server):
    url = f"file://{server.root}/0.png"
    assert say(server, CHAT, messages=user({"type": "image_url", "image_url": {"url": url}}, MARK_PART)).status_code == 200
    assert shape(server) == [digest(server, 0), MARK]


@pytest.mark.parametrize("more", [{"n": 3}, {"n": 2, "use_beam_search": True}])
def test_several_answers_share_their_picture(server, more):
    answer = say(server, CHAT, messages=user(part(0), MARK_PART), **more)
    assert len(answer.json()["choices"]) == more["n"]
    assert all(prompt.extras.media == server.prompts[0].extras.media for prompt in server.prompts)


def test_beams_cannot_be_part_of_a_prompt_that_attends_to_all_of_itself(server, monkeypatch):
    monkeypatch.setattr(media_of(server.llm.config).family, "bidirectional", "prompt", raising=False)
    answer = say(server, CHAT, messages=user(part(0), MARK_PART), n=2, use_beam_search=True)
    assert answer.status_code == 400 and "use_beam_search is not supported with images in Llava" in error_of(answer)["message"]


def test_developers_can_reset_the_cache(server):
    say(server, CHAT, messages=user(part(0)))
    assert server.llm.media.cache.bytes
    server.call(server.llm.reset_mm_cache())
    assert not server.llm.media.cache.bytes


def test_models_that_see_say_so(server):
    assert "vision" in server.http.post("/api/show", json={}).json()["capabilities"]


def test_larger_bodies_are_taken_by_models_that_see(server):
    large = encoded(0) + "A" * (20 << 20)
    answer = say(server, CHAT, messages=user({"type": "image_url", "image_url": f"data:image/png;base64,{large}"}))
    assert answer.status_code == 400 and error_of(answer)["message"].startswith("messages[0].content[0]: ")
    answer = server.http.post(CHAT, content=b" " * (64 << 20) + b"1", headers={"content-type": "application/json"})
    assert answer.status_code == 413


def test_images_are_refused_by_a_model_that_reads_text(server, tmp_path):
    from scripted import Scripted, byte_tokenizer

    text_only = Scripted(byte_tokenizer(tmp_path))
    for path, place in ((CHAT, "messages[0].content[0]"), ("/v1/messages", "messages[0].content[0]")):
        body = {"messages": user(part(0) if path == CHAT else claude(0)), "max_tokens": 2}
        answer = text_only.post(path, body)
        assert answer.status_code == 400
        assert (
            answer.json()["error"]["message"]
            == f"{place}: image input is not supported by Scripted, which reads text only. Remove it"
        )
    answer = text_only.post(CHAT, {"messages": user(MARK_PART), "mm_processor_kwargs": {"a": 1}})
    assert error_of(answer)["param"] == "mm_processor_kwargs"
