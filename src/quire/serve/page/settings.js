// What a request asks for beside the conversation, and the same request as commands for elsewhere.
// An empty field is not sent: the model's own default counts.

const server = { length: 0, sees: false };

const number = (label, min, max) => ({ label, kind: "number", min, max });
const FIELDS = {
  system: { label: "System prompt", kind: "text", rows: 4, hint: "Instructions for the model; empty: none" },
  temperature: number("Temperature", 0, 2),
  top_p: number("Top p", 0, 1),
  top_k: number("Top k", -1),
  min_p: number("Min p", 0, 1),
  max_tokens: number("Max tokens", 1),
  seed: number("Seed"),
  repetition_penalty: number("Repetition penalty", 0, 2),
  presence_penalty: number("Presence penalty", -2, 2),
  frequency_penalty: number("Frequency penalty", -2, 2),
  stop: { label: "Stop sequences", kind: "lines", rows: 2, hint: "One per line; empty: none" },
  tools: { label: "Tools", kind: "json", rows: 4, hint: "A JSON list, as in the API; you type the results" },
  more: { label: "Other request fields", kind: "json", rows: 3, hint: 'JSON, as in {"min_tokens": 5}' },
};

function showSettings() {
  ui.settingsFields.replaceChildren(...Object.entries(FIELDS).map(([name, { label, kind, min, max, rows, hint }]) => {
    const input = el(kind === "number" ? "input" : "textarea", { value: chats.current.settings[name] ?? "", placeholder: hint || "model default" });
    if (kind === "number") Object.assign(input, { type: "number", min: min ?? "", max: max ?? "", step: "any" });
    else input.rows = rows;
    input.addEventListener("input", () => setSetting(name, input));
    return el("label", { className: kind }, label, input);
  }));
}

function setSetting(name, input) {
  const { settings } = chats.current;
  if (input.value.trim()) settings[name] = input.value;
  else delete settings[name];
  input.ariaInvalid = !input.checkValidity() || (FIELDS[name].kind === "json" && parsed(input.value) === undefined && input.value.trim() !== "");
  kept.set("settings", settings);
  chats.save(chats.current);
}

function resetSettings() {
  chats.current.settings = {};
  kept.set("settings", {});
  chats.save(chats.current);
  showSettings();
}

/** The values that are sent; what is no JSON is not, and said so. */
function sampling(settings) {
  const body = {};
  for (const [name, { kind, label }] of Object.entries(FIELDS)) {
    const text = settings[name];
    if (text === undefined || kind === "text") continue;
    const value = kind === "lines" ? text.split("\n").filter(Boolean) : parsed(text);
    if (value === undefined) announce(`“${label}” is not valid JSON and was left out`);
    else if (name === "more") Object.assign(body, value);
    else body[name] = value;
  }
  return body;
}

function requestBody(chat, upTo) {
  const messages = chat.settings.system ? [{ role: "system", content: chat.settings.system }] : [];
  for (const turn of chat.turns.slice(0, upTo)) messages.push(messageFrom(turn));
  const model = ui.model.value;
  return { ...(model && { model }), messages, ...sampling(chat.settings), stream: true, stream_options: { include_usage: true } };
}

function messageFrom(turn) {
  if (turn.role === "user") return { role: "user", content: contentOf(turn) };
  if (turn.role === "tool") return { role: "tool", tool_call_id: turn.id, content: turn.text };
  const { text, calls } = answerOf(turn);
  const told = calls.map(({ id, name, arguments: given }) => ({ id, type: "function", function: { name, arguments: given } }));
  return { role: "assistant", content: text, ...(told.length && { tool_calls: told }) };
}

// ---- export

const EXPORTS = { curl: exportCurl, Python: exportPython, JSON: exportMessages };

function showExport(kind = "curl") {
  const text = EXPORTS[kind]();
  ui.exportKinds.replaceChildren(...Object.keys(EXPORTS).map((name) =>
    el("button", { "aria-pressed": String(name === kind), onclick: () => showExport(name) }, name)));
  ui.exportText.textContent = text;
  ui.exportCopy.replaceChildren(copyButton(() => text));
  if (!ui.exportDialog.open) ui.exportDialog.showModal();
}

/** The request that gave the last answer, or would give the next one. */
function exportedBody() {
  const { turns } = chats.current;
  const upTo = turns.at(-1)?.role === "assistant" ? turns.length - 1 : turns.length;
  const { stream: _, stream_options: __, ...body } = requestBody(chats.current, upTo);
  if (!body.messages.some(({ role }) => role === "user")) body.messages.push({ role: "user", content: ui.prompt.value || "Hello!" });
  return body;
}

function exportCurl() {
  const json = JSON.stringify(exportedBody(), null, 2).replaceAll("'", "'\\''");
  const key = ownKey() ? ' \\\n  -H "Authorization: Bearer $QUIRE_API_KEY"' : "";
  return `curl ${location.origin}${BASE}/v1/chat/completions \\\n  -H 'Content-Type: application/json'${key} \\\n  -d '${json}'`;
}

/** The conversation so far, as `quire chat` loads it and this page imports it. */
function exportMessages() {
  return JSON.stringify({ messages: requestBody(chats.current, chats.current.turns.length).messages }, null, 2);
}

const OPENAI_FIELDS = new Set("model messages temperature top_p max_tokens seed presence_penalty frequency_penalty stop tools".split(" "));

function exportPython() {
  const body = exportedBody();
  const { own, other } = Object.groupBy(Object.entries(body), ([name]) => (OPENAI_FIELDS.has(name) ? "own" : "other"));
  if (other) own.push(["extra_body", Object.fromEntries(other)]);
  const lines = own.map(([name, value]) => `    ${name}=${pythonOf(value)},`);
  const key = ownKey();
  return [
    `${key ? "import os\n" : ""}from openai import OpenAI\n`,
    `client = OpenAI(base_url="${location.origin}${BASE}/v1", api_key=${key ? 'os.environ["QUIRE_API_KEY"]' : '"none"'})`,
    "answer = client.chat.completions.create(",
    ...lines,
    ")",
    "print(answer.choices[0].message.content)",
  ].join("\n");
}

/** Python reads JSON but for three words. */
function pythonOf(value) {
  const words = { true: "True", false: "False", null: "None" };
  const json = JSON.stringify(value, null, 4).replaceAll("\n", "\n    ");
  return json.replace(/("(?:[^"\\]|\\.)*")|true|false|null/g, (found, text) => text ?? words[found]);
}
