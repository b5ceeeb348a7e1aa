// Conversations. One is {id, title, updated, settings, turns}; a turn is
//   {role: "user", text, pictures?}    {role: "tool", id, name, text}    {role: "assistant", versions: [answer], at}
// and an answer {text, reasoning, calls, finish, usage, first, seconds, error, request}. Regenerating or editing an answer adds a
// version. Editing another turn begins a branch: the turn that replaces it has fork: {at, tails}. tails holds the turns from there
// on of every branch but the shown one, whose place (at) is null.

const chats = {
  all: [],
  current: null,
  live: null, // the answer that is being written: {chat, answer, abort, view}

  load() {
    this.all = kept.names("chat.").map((name) => kept.get(name)).filter((chat) => Array.isArray(chat?.turns));
    this.all.sort((a, b) => b.updated - a.updated);
    const last = kept.get("current");
    this.open(this.all.find((chat) => chat.id === last) || this.all[0] || this.fresh());
  },
  fresh() {
    const settings = { ...(this.current?.settings || kept.get("settings", {})) };
    return { id: crypto.getRandomValues(new Uint32Array(2)).join("-"), title: "", updated: Date.now(), settings, turns: [] };
  },
  add() {
    this.open(this.current && !this.current.turns.length ? this.current : this.fresh());
    ui.prompt.focus();
  },
  open(chat) {
    this.current = chat;
    kept.set("current", chat.id);
    showChat();
    showSettings();
    listChats();
  },
  save(chat) {
    if (!chat.turns.length) return;
    if (!this.all.includes(chat)) this.all.unshift(chat);
    chat.title ||= firstWords(chat.turns[0].text || (chat.turns[0].pictures ? "Picture" : ""));
    chat.updated = Date.now();
    kept.set(`chat.${chat.id}`, chat);
    listChats();
  },
  remove(chat) {
    if (this.live?.chat === chat) this.live.abort.abort();
    kept.drop(`chat.${chat.id}`);
    this.all = this.all.filter((other) => other !== chat);
    if (chat === this.current) this.open(this.all[0] || this.fresh());
    else listChats();
  },
};

const firstWords = (text) => text.trim().split("\n")[0].slice(0, 60) || "Untitled";
const answerOf = (turn) => turn.versions[turn.at];

// ---- what is shown

function showChat() {
  const { turns } = chats.current;
  showTitle();
  ui.welcome.hidden = turns.length > 0;
  ui.messages.replaceChildren(...turns.map((turn, i) => turnView(turn, i)));
  showComposer();
  scrollDown();
}

function showTitle() {
  document.title = chats.current.title ? `${chats.current.title} · Quire` : "Quire";
}

function turnView(turn, at) {
  const last = at === chats.current.turns.length - 1;
  if (turn.role === "assistant") {
    const shown = new AnswerView(answerOf(turn));
    const live = chats.live?.answer === shown.answer;
    shown.update(!live);
    if (live) chats.live.view = shown;
    else shown.node.append(answerFoot(turn, last, shown.node));
    return shown.node;
  }
  const node = turn.role === "tool"
    ? el("article", { className: "turn tool", ariaLabel: "Result of a tool" }, el("b", {}, turn.name), el("pre", {}, turn.text))
    : el("article", { className: "turn user", ariaLabel: "Your message" }, picturesView(turn), turn.text && el("div", { className: "said" }, ...plainBoxes(turn.text)));
  const edit = iconButton("edit", "Edit", () => editTurn(node, turn.text, (text) => branch(at, text)));
  const switched = turn.fork ? switcher("branch", turn.fork.at, turn.fork.tails.length, (step) => switchBranch(at, step)) : [];
  node.append(el("footer", {}, edit, copyButton(() => turn.text), ...switched));
  return node;
}

/** Buttons to go through the alternatives of a turn. */
function switcher(what, at, total, go) {
  const move = (step) => () => !chats.live && go(step);
  return [iconButton("left", `Previous ${what}`, move(-1)), `${at + 1} / ${total}`, iconButton("right", `Next ${what}`, move(1))];
}

/** Shows one answer, again and again while it grows. */
class AnswerView {
  constructor(answer) {
    this.answer = answer;
    this.thoughts = new MarkdownView();
    this.text = new MarkdownView();
    this.summary = el("summary");
    this.reasoning = el("details", { className: "reasoning" }, this.summary, this.thoughts.root);
    this.calls = el("div");
    this.note = el("p", { className: "error" });
    this.node = el("article", { className: "turn", ariaLabel: "Answer" }, this.reasoning, this.text.root, this.calls, this.note);
    this.cost = 0;
  }

  /** As often as the screen, but never more than a quarter of the time: a long answer must not freeze the page. */
  soon() {
    if (this.due) return;
    this.due = setTimeout(() => requestAnimationFrame(() => {
      this.due = 0;
      const began = performance.now();
      if (chats.live?.view === this) inPlace(() => this.update(false));
      this.cost = performance.now() - began;
    }), this.cost * 3);
  }

  update(over) {
    const { answer } = this;
    const thinking = !over && !answer.text && !answer.calls.length;
    this.node.classList.toggle("waiting", thinking && !answer.reasoning);
    this.reasoning.hidden = !answer.reasoning;
    setText(this.summary, thinking ? "Thinking…" : `Thought for ${duration(answer.thought ?? answer.seconds)}`);
    this.thoughts.show(answer.reasoning, over);
    this.text.show(answer.text, over);
    this.calls.replaceChildren(...answer.calls.map(callView));
    this.note.hidden = !answer.error;
    this.note.textContent = answer.error || "";
  }
}

function callView({ name, arguments: given }) {
  const value = parsed(given); // undefined until it is complete
  const shown = value === undefined ? given : JSON.stringify(value, null, 2);
  return el("section", { className: "call", ariaLabel: `Call of ${name}` }, el("header", {}, icon("tool"), el("code", {}, name)), codeView(shown, "json"));
}

function answerFoot(turn, last, node) {
  const answer = answerOf(turn);
  const edit = iconButton("edit", "Edit", () => editTurn(node, answer.text, (text) => editAnswer(turn, text), "Save"));
  const foot = el("footer", {}, edit, copyButton(() => answer.text || answer.reasoning));
  if (last) foot.append(iconButton("again", "Regenerate", regenerate));
  if (turn.versions.length > 1) {
    foot.append(...switcher("version", turn.at, turn.versions.length, (step) => {
      turn.at = (turn.at + step + turn.versions.length) % turn.versions.length;
      chats.save(chats.current);
      showChat();
    }));
  }
  const facts = answerFacts(answer);
  if (facts && !answer.request) foot.append(el("span", { className: "facts" }, facts));
  else if (facts) foot.append(el("a", { className: "facts", href: `#engine/${encodeURIComponent(answer.request)}`, title: "How this answer was made" }, facts));
  return last && answer.calls.length ? el("div", {}, resultForm(answer.calls), foot) : foot;
}

function answerFacts(answer) {
  const tokens = answer.usage?.completion_tokens;
  const facts = [];
  if (tokens) facts.push(`${count(tokens)} tokens`);
  if (tokens > 1) facts.push(`${rate((tokens - 1) / (answer.seconds - answer.first))} per second`);
  if (answer.first) facts.push(`first after ${duration(answer.first)}`);
  if (answer.finish === "length") facts.push("stopped at max tokens");
  if (answer.finish === "stopped" || answer.finish === "edited") facts.push(answer.finish);
  return facts.join(" · ");
}

/** What the tools gave, written by hand: the conversation goes on with it. */
function resultForm(calls) {
  const fields = calls.map((called) => el("textarea", { rows: 2, ariaLabel: `Result of ${called.name}`, placeholder: `What ${called.name} returns` }));
  const form = el("form", { className: "results" }, ...fields, el("button", { type: "submit" }, calls.length > 1 ? "Send results" : "Send result"));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (chats.live) return;
    calls.forEach((called, i) => chats.current.turns.push({ role: "tool", id: called.id, name: called.name, text: fields[i].value }));
    answerNow();
  });
  return form;
}

/** Replaces a turn by a field with its text until it is sent or given up. */
function editTurn(node, text, done, verb = "Send") {
  if (chats.live) return;
  const field = el("textarea", { value: text, rows: Math.min(12, text.split("\n").length + 1), ariaLabel: "Edited message" });
  const buttons = el("div", {}, el("button", { type: "submit", className: "primary" }, verb), el("button", { onclick: showChat }, "Cancel"));
  const form = el("form", { className: "edit" }, field, buttons);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (field.value.trim() || chats.current.turns[[...ui.messages.children].indexOf(node)]?.pictures) done(field.value);
  });
  form.addEventListener("keydown", (event) => {
    if (event.key === "Escape") showChat();
    else if (sends(event)) form.requestSubmit();
  });
  node.replaceChildren(form);
  field.focus();
  field.setSelectionRange(field.value.length, field.value.length);
}

function editLast() {
  const at = chats.current.turns.findLastIndex((turn) => turn.role === "user");
  ui.messages.children[at]?.querySelector("footer [title=Edit]")?.click();
}

/** Takes the turns from `at` on out of the conversation and puts them among the branches of that turn. */
function foldBranch(at) {
  const tail = chats.current.turns.splice(at);
  const fork = tail[0].fork || { at: 0, tails: [null] };
  delete tail[0].fork;
  fork.tails[fork.at] = tail;
  return fork;
}

/** A turn with another text, in a branch of its own; results of other tools of the same answer come along. */
function branch(at, text) {
  const { turns } = chats.current;
  const end = turns.findIndex((turn, i) => i > at && turn.role !== "tool");
  const others = turns[at].role === "tool" ? turns.slice(at + 1, end < 0 ? turns.length : end).map(({ fork: _, ...turn }) => turn) : [];
  const { fork: _, ...turn } = turns[at];
  const fork = foldBranch(at);
  fork.at = fork.tails.push(null) - 1;
  turns.push({ ...turn, text, fork }, ...others);
  answerNow();
}

function switchBranch(at, step) {
  const fork = foldBranch(at);
  fork.at = (fork.at + step + fork.tails.length) % fork.tails.length;
  const tail = fork.tails[fork.at];
  fork.tails[fork.at] = null;
  tail[0].fork = fork;
  chats.current.turns.push(...tail);
  chats.save(chats.current);
  showChat();
}

/** The model did not write this one: it has no times and no tokens. */
function editAnswer(turn, text) {
  const { reasoning, calls } = answerOf(turn);
  turn.at = turn.versions.push({ text, reasoning, calls, finish: "edited", seconds: 0 }) - 1;
  chats.save(chats.current);
  showChat();
}

/** Enter sends, unless it makes a new line or ends a word of an input method. */
function sends(event) {
  const yes = event.key === "Enter" && !event.shiftKey && !event.isComposing;
  if (yes) event.preventDefault();
  return yes;
}

function scrollDown() {
  ui.talk.scrollTop = ui.talk.scrollHeight;
}

/** Whoever reads the end goes on reading the end; whoever reads above it stays there. */
function inPlace(change) {
  const down = ui.talk.scrollHeight - ui.talk.scrollTop - ui.talk.clientHeight < 80;
  change();
  if (down) scrollDown();
}

function showComposer() {
  const busy = Boolean(chats.live);
  ui.send.hidden = busy;
  ui.stop.hidden = !busy;
  ui.send.disabled = !ui.prompt.value.trim() && !pictures.waiting.length;
  const used = chats.current.turns.findLast((turn) => turn.role === "assistant" && answerOf(turn).usage);
  const total = used && answerOf(used).usage.total_tokens;
  ui.context.textContent = used && server.length ? `${count(total)} of ${count(server.length)} tokens` : "";
  ui.context.classList.toggle("full", total > 0.9 * server.length);
}

// ---- asking

function say(text) {
  if (chats.live) return;
  const added = pictures.take();
  chats.current.turns.push({ role: "user", text, ...(added.length && { pictures: added }) });
  answerNow();
}

function regenerate() {
  const last = chats.current.turns.at(-1);
  if (chats.live || last?.role !== "assistant") return;
  answerNow(last);
}

async function answerNow(turn) {
  const chat = chats.current;
  const answer = { text: "", reasoning: "", calls: [], finish: null, seconds: 0 };
  const body = requestBody(chat, turn ? chat.turns.length - 1 : chat.turns.length);
  if (turn) turn.at = turn.versions.push(answer) - 1;
  else chat.turns.push({ role: "assistant", versions: [answer], at: 0 });
  chats.live = { chat, answer, abort: new AbortController() };
  chats.save(chat);
  showChat();
  try {
    await streamAnswer(body, answer);
    announce("The answer is complete", true);
  } catch (error) {
    if (error.name === "AbortError") answer.finish = "stopped";
    else answer.error = error instanceof ServerError ? error.message : "The connection was lost. Regenerate asks again.";
  }
  const { view: shown } = chats.live;
  chats.live = null;
  if (chats.all.includes(chat)) chats.save(chat); // it may have been deleted
  if (chat === chats.current) {
    inPlace(() => {
      shown.update(true);
      shown.node.append(answerFoot(chat.turns.at(-1), true, shown.node));
    });
  }
  showComposer();
}

async function streamAnswer(body, answer) {
  const began = performance.now();
  const { abort } = chats.live;
  const response = await call("/v1/chat/completions", { method: "POST", body: JSON.stringify(body), signal: abort.signal });
  for await (const { data } of readEvents(response)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new ServerError(event.error.code, event.error.message);
    answer.request ??= event.id;
    if (event.usage) answer.usage = event.usage;
    answer.seconds = (performance.now() - began) / 1000;
    for (const choice of event.choices) if (choice.index === 0) takeDelta(answer, choice);
    chats.live.view.soon();
  }
  throw new TypeError("the stream broke off");
}

function takeDelta(answer, { delta, finish_reason: finish }) {
  const { seconds } = answer;
  const thought = delta.reasoning ?? delta.reasoning_content;
  if (thought || delta.content || delta.tool_calls) answer.first ??= seconds;
  if (thought) answer.reasoning += thought;
  if (delta.content || delta.tool_calls) answer.thought ??= seconds - (answer.first || 0);
  answer.text += delta.content || "";
  for (const part of delta.tool_calls || []) {
    const called = (answer.calls[part.index] ??= { id: part.id, name: "", arguments: "" });
    called.name += part.function?.name || "";
    called.arguments += part.function?.arguments || "";
  }
  if (finish) answer.finish = finish;
}

function stopAnswer() {
  chats.live?.abort.abort();
}
