// The list of conversations: renamed, searched, written to a file and read from one.

const MOST_IMPORTED = 20e6; // bytes of a file
const MOST_FORKS = 50; // branches in branches of an imported conversation

function listChats() {
  const wanted = ui.search.value.trim().toLowerCase();
  const found = chats.all.filter((chat) => !wanted || textsOf(chat.turns).concat(chat.title).some((text) => text.toLowerCase().includes(wanted)));
  ui.chatList.replaceChildren(...found.map(chatRow));
  ui.noneFound.hidden = found.length > 0 || !wanted;
}

/** All that was said, also in branches and versions that are not shown. */
function textsOf(turns) {
  return turns.flatMap((turn) => [
    ...(turn.versions ? turn.versions.map((answer) => answer.text) : [turn.text]),
    ...(turn.fork?.tails || []).flatMap((tail) => (tail ? textsOf(tail) : [])),
  ]);
}

function chatRow(chat) {
  const current = chat === chats.current;
  const node = el("li", { className: current ? "current" : "" });
  const open = el("button", { className: "chatName", ariaCurrent: current, onclick: () => { showMenu(false); chats.open(chat); } }, chat.title);
  const rename = iconButton("edit", `Rename ${chat.title}`, () => renameChat(node, chat));
  const remove = iconButton("trash", `Delete ${chat.title}`, () => confirm(`Delete “${chat.title}”?`) && chats.remove(chat));
  node.append(open, rename, remove);
  return node;
}

function renameChat(node, chat) {
  const field = el("input", { value: chat.title, maxLength: 120, ariaLabel: "Title" });
  let over = false;
  const finish = (title) => {
    if (over) return;
    over = true;
    if (title !== null) chat.title = title.trim();
    chats.save(chat); // an empty title becomes the first words again
    if (chat === chats.current) showTitle();
  };
  field.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" && event.key !== "Escape") return;
    event.stopPropagation();
    finish(event.key === "Enter" ? field.value : null);
  });
  field.addEventListener("blur", () => finish(field.value));
  node.replaceChildren(field);
  field.select();
}

// ---- files

function exportChats() {
  const text = JSON.stringify({ quire: 1, conversations: chats.all }, null, 1);
  const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  el("a", { href: url, download: "quire-conversations.json" }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

async function importChats(file) {
  if (file.size > MOST_IMPORTED) return announce(`The file must have at most ${MOST_IMPORTED / 1e6} MB`);
  const found = parsed(await file.text());
  const list = found?.conversations || (Array.isArray(found?.messages) ? [found] : []);
  const read = (Array.isArray(list) ? list : []).map(readChat).filter(Boolean);
  for (const chat of read) chats.save(chat);
  if (read.length) chats.open(read[0]);
  announce(read.length ? `Imported ${read.length} conversation${read.length > 1 ? "s" : ""}` : "The file holds no conversations: export one here, or use {\"messages\": [...]}");
}

const textOf = (value) => (typeof value === "string" ? value : "");
const numberOf = (value) => (Number.isFinite(value) ? value : undefined);

/** A conversation of a file, with nothing in it but what the page knows; null if it is none. `messages` are the API's. */
function readChat(given) {
  const chat = { ...chats.fresh(), title: textOf(given?.title).slice(0, 120), settings: {} };
  if (Array.isArray(given?.messages)) {
    const [first] = given.messages;
    if (first?.role === "system") chat.settings.system = textOf(first.content);
    chat.turns = given.messages.map(turnOfMessage).filter(Boolean);
  } else chat.turns = readTurns(given?.turns, 0);
  for (const name of Object.keys(FIELDS)) if (textOf(given?.settings?.[name])) chat.settings[name] = given.settings[name];
  return chat.turns.length && chat.turns[0].role === "user" ? chat : null;
}

function turnOfMessage(message) {
  const { text, ...rest } = readContent(message?.content);
  if (message?.role === "user") return { role: "user", text, ...rest };
  if (message?.role === "tool") return { role: "tool", id: textOf(message.tool_call_id), name: "tool", text };
  if (message?.role !== "assistant") return null;
  const calls = (Array.isArray(message.tool_calls) ? message.tool_calls : []).map((one) => ({ id: one?.id, ...one?.function }));
  return { role: "assistant", versions: [readAnswer({ text, calls })], at: 0 };
}

function readTurns(given, depth) {
  return (Array.isArray(given) && depth < MOST_FORKS ? given : []).map((turn) => readTurn(turn, depth)).filter(Boolean);
}

function readTurn(turn, depth) {
  if (turn?.role === "assistant") {
    const versions = (Array.isArray(turn.versions) ? turn.versions : []).map(readAnswer);
    return versions.length ? { role: "assistant", versions, at: versions[turn.at] ? turn.at : 0 } : null;
  }
  if (turn?.role !== "user" && turn?.role !== "tool") return null;
  const read = { role: turn.role, text: textOf(turn.text), ...(turn.role === "user" && readPictures(turn.pictures)) };
  if (turn.role === "tool") Object.assign(read, { id: textOf(turn.id), name: textOf(turn.name) });
  const tails = (Array.isArray(turn.fork?.tails) ? turn.fork.tails : []).map((tail) => tail && readTurns(tail, depth + 1));
  const { at } = turn.fork || {};
  if (tails.length > 1 && tails[at] === null && tails.every((tail, i) => i === at || tail?.[0]?.role === turn.role)) read.fork = { at, tails };
  return read;
}

function readAnswer(given) {
  const calls = (Array.isArray(given?.calls) ? given.calls : []).map((one) => ({ id: textOf(one?.id), name: textOf(one?.name), arguments: textOf(one?.arguments) }));
  const tokens = numberOf(given?.usage?.completion_tokens);
  const total = numberOf(given?.usage?.total_tokens);
  return {
    text: textOf(given?.text), reasoning: textOf(given?.reasoning), calls, finish: textOf(given?.finish) || null, seconds: numberOf(given?.seconds) ?? 0,
    first: numberOf(given?.first), thought: numberOf(given?.thought), usage: tokens && total ? { completion_tokens: tokens, total_tokens: total } : undefined,
  };
}
